r"""How much members of an ensemble, or draws of a posterior, differ in what they predict.

Of probabilities $p_1, ..., p_S$ for one example, disagreement is the share of pairs with different
answers, and mutual KL the mean of $KL(p_i | p_j)$ over all ordered pairs. Both need one pass over
the draws, not one over the pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.errors import DataError
from bayesify.evaluation.checks import count, require_numbers


def disagreement(draws: Tensor) -> Tensor:
    """Share of pairs of draws `[S, B, C, ...]` with different answers, `[B, ...]`.

    Example:
        >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]], [[0.3, 0.7]]]))
        tensor([0.6667])
    """
    size = _several(draws)
    votes = one_hot(draws.argmax(2), draws.shape[2]).sum(0)
    agreeing = (votes * (votes - 1)).sum(-1)
    return 1 - agreeing.to(draws.dtype) / (size * (size - 1))


def mutual_kl(draws: Tensor) -> Tensor:
    """Mean KL divergence between two draws of `[S, B, C, ...]`, in nats, `[B, ...]`.

    A probability of 0 counts as the smallest number in a logarithm.
    """
    size = _several(draws)
    logs = draws.clamp_min(torch.finfo(draws.dtype).tiny).log()
    # sum_ij p_i (log p_i - log p_j), to which a draw paired with itself adds nothing. Deviations
    # from the mean log sum to 0, so that large logarithms cancel before they are summed.
    total = (draws * (logs - logs.mean(0))).sum((0, 2))
    return (total / (size - 1)).clamp_min(0)


def by_member(draws: Tensor, members: int) -> Tensor:
    """Mean probabilities of each member, `[M, B, ...]`, of draws that members take turns in.

    Args:
        draws: `[S, B, ...]`, as `predict(..., keep_draws=True)` keeps them.
        members: M, `model.method.components`.
    """
    count("members", members)
    if len(draws) % members:
        raise DataError(
            f"{len(draws)} draws are not the same number for each of {members} members."
        )
    return draws.unflatten(0, (-1, members)).mean(0)


def _several(draws: Tensor) -> int:
    if draws.ndim < 3 or len(draws) < 2:
        raise DataError(
            f"draws have shape {list(draws.shape)}: diversity needs [draws, batch, classes, ...] "
            f"with at least two draws. Use predict(..., keep_draws=True).draws."
        )
    require_numbers("draws", draws)
    return len(draws)
