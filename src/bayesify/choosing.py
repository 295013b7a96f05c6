"""where="auto": how much of a network is made random, chosen by held-out likelihood.

Late layers are cheap to make random, as all draws share what stands before them. So the candidates
are the last layers, a growing share of them, up to all. Each has its noise and temperature chosen
on half of the data, as `calibrate` does, and is judged on the other half, by the same random
numbers. The choice is the cheapest that is worse than the best by no more than one standard error
of their paired difference.

Cost is counted, not timed, so that the same data and seed give the same choice: operations from
the first random layer on, once a draw, and those before it once.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from bayesify.batches import is_loader
from bayesify.choice import Candidate, Choice
from bayesify.errors import BayesifyWarning, DataError, SettingError, UnknownSiteError
from bayesify.likelihood import Likelihood
from bayesify.methods import Method
from bayesify.model import BayesianModel, convert
from bayesify.operations import count_operations
from bayesify.posterior import key
from bayesify.validation import HeldOut, collect, hold_out

SHARES: tuple[float, ...] = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)  # the last ones; at least a layer
FEWEST = 4  # examples: two that judge have a standard error


def choose(
    model: nn.Module,
    method: Method | None = None,
    *,
    likelihood: str | Likelihood = "classification",
    validation: Iterable[Any] | None = None,
    training: Iterable[Any] | None = None,
    seed: int = 0,
) -> Choice:
    """Chooses how much of a network a method should make random; see `convert` for the arguments.

    Raises:
        SettingError: If there is no data, or the method knows no spread before it is fitted.
        UnknownSiteError: If the method makes no tensor random.
        DataError: If the data cannot be used.

    Example:
        >>> import torch
        >>> from bayesify import ABNN
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 8), nn.LayerNorm(8))
        >>> x = torch.randn(200, 3)
        >>> y = 4 * network(x).detach() * torch.randn(200, 8)
        >>> choice = choose(network, ABNN(), likelihood="regression", validation=[(x, y)])
        >>> choice.sites
        ('2.weight',)
    """
    whole = convert(model, method, likelihood=likelihood, where=1.0)
    _require_spread(whole)
    held = _held_out(validation, training, seed)
    calibrating, judging = held.halves()
    example = judging[0][0][:1].to(whole.device)
    begins, total = count_operations(
        whole.sites, whole.runner.replicas.get(), lambda _: whole.runner.plain({}, example)
    )
    order = sorted((site.name for site in whole.sites), key=begins.__getitem__)
    tried, losses, costs = [], [], []
    for where in _counts([begins[name] for name in order]):
        bnn = convert(model, method, likelihood=likelihood, where=set(order[-where:]).__contains__)
        bnn.strategy = "folded"  # the same to the last bit each time, whatever is fastest
        found = bnn.calibrate(calibrating, seed=seed)
        each, _ = bnn.losses(judging, draws=bnn.method.draws, seed=key("judge", seed))
        numbers = sum(math.prod(shape) for shape in bnn.posterior.shapes().values())
        tried.append((where, numbers, found.noise, found.temperature))
        losses.append(each.double().cpu())
        before = begins[order[-where]]
        costs.append(before + bnn.method.draws * (total - before))
    best = min(losses, key=lambda each: each.mean().item())
    candidates = tuple(
        Candidate(*row, *_judge(each, best), cost / costs[-1])
        for row, each, cost in zip(tried, losses, costs, strict=True)
    )
    choice = Choice(candidates, tuple(order), len(best), held.augmented)
    if choice.chosen.noise == 0:
        warnings.warn(
            f"where='auto' had little to choose by: the network itself, without noise, is as "
            f"likely as any candidate on these {len(best)} examples, so the cheapest was taken. "
            f"Pass more data that the network has not seen, or say which sites: where=4 for the "
            f"last four.",
            BayesifyWarning,
            stacklevel=3,
        )
    return choice


def _judge(losses: Tensor, best: Tensor) -> tuple[float, float, float]:
    """Mean loss, how much it is above the best one's, and the standard error of that."""
    above = losses - best
    return losses.mean().item(), above.mean().item(), above.std().item() / math.sqrt(len(above))


def _require_spread(whole: BayesianModel) -> None:
    name = type(whole.method).__name__
    if not whole.sites:
        raise UnknownSiteError(
            f"where='auto': {name} makes none of the network's tensors random. Drop where=."
        )
    if whole.posterior.is_certain():
        raise SettingError(
            f"where='auto': {name} is certain before `fit`, and candidates are judged before it. "
            f"Say which sites, where=4 for the last four, or choose with ABNN or BayesAdapter."
        )


def _held_out(
    validation: Iterable[Any] | None, training: Iterable[Any] | None, seed: int
) -> HeldOut:
    given = training if validation is None else validation
    if given is None or (validation is not None and training is not None):
        raise SettingError(
            "where='auto' chooses by held-out data: pass validation=, a loader of data that the "
            "network has not seen, or training=, of which a part decides; not both."
        )
    if not is_loader(given):
        raise DataError(
            f"where='auto' takes a loader of batches, and a {type(given).__name__} is none. Pass "
            f"a DataLoader or a list of (inputs, target)."
        )
    held = hold_out(given, seed)[1] if validation is None else collect(given, seed)
    if len(held) < FEWEST:
        raise DataError(
            f"where='auto' has {len(held)} examples to choose by, and needs {FEWEST} at the very "
            f"least, hundreds to tell candidates apart. Pass more data, or say which sites."
        )
    return held


def _counts(begins: Sequence[float]) -> list[int]:
    """How many of the last sites each candidate has, brought up to whole layers.

    A layer costs the same whether its bias is random or its weight too.
    """
    least = (max(1, math.ceil(share * len(begins))) for share in SHARES)
    return sorted({sum(begin >= begins[-count] for begin in begins) for count in least})
