r"""Measures of class probabilities, each a number an example: their mean is the measure.

The Brier score $\sum_c (p_c - y_c)^2$ falls into parts (Murphy, *A New Vector Partition of the
Probability Score*, 1973): predictions are put into bins class by class, and with $\bar p_k$ the
mean prediction and $\bar y_k$ the frequency in a bin that holds a share $w_k$ of the examples,

$$\underbrace{\sum_k w_k (\bar p_k - \bar y_k)^2}_{reliability} - \underbrace{\sum_k w_k
(\bar y_k - \bar y)^2}_{resolution} + \underbrace{\bar y (1 - \bar y)}_{uncertainty}$$

summed over classes. What the predictions of one bin differ by is left over, `within` (Stephenson et
al., *Two Extra Components in the Brier Score Decomposition*, 2008).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.errors import DataError
from bayesify.evaluation.calibration import BINS, classwise_sums
from bayesify.evaluation.checks import alike, classes, require_numbers


def correct(probs: Tensor, target: Tensor) -> Tensor:
    """Whether the most probable class of `[B, C, ...]` is the target, `[B, ...]`.

    Example:
        >>> correct(torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor([ True, False])
    """
    probs, target = classes(probs, target)
    return probs.argmax(1) == target


def nll(probs: Tensor, target: Tensor) -> Tensor:
    """-log of the target's probability, `[B, ...]`; finite, as 0 counts as the smallest number."""
    probs, target = classes(probs, target)
    chosen = probs.gather(1, target.unsqueeze(1)).squeeze(1)
    return -chosen.clamp_min(torch.finfo(chosen.dtype).tiny).log()


def brier(probs: Tensor, target: Tensor) -> Tensor:
    """Squared distance of probabilities `[B, C, ...]` from the truth, `[B, ...]`.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor([0.5000])
    """
    probs, target = classes(probs, target)
    return (probs - one_hot(target, probs.shape[1]).movedim(-1, 1)).square().sum(1)


def soft_label_kl(probs: Tensor, people: Tensor) -> Tensor:
    """KL(people | probs) in nats, `[B, ...]`: how far a prediction is from what people said.

    Args:
        probs: Predictions, `[B, C, ...]`.
        people: Shares of people for each class (CIFAR-10H), or their counts, of the same shape.

    Example:
        >>> soft_label_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[51, 0]]))
        tensor([0.6931])
    """
    alike(probs=probs, people=people)
    require_numbers("probs", probs)
    require_numbers("people", people)
    votes = people.to(probs).sum(1, keepdim=True)
    if (people < 0).any() or (votes <= 0).any():
        raise DataError("people must be shares or counts, 0 or more and not all 0 for any example.")
    shares = people.to(probs) / votes
    floor = probs.clamp_min(torch.finfo(probs.dtype).tiny)
    return (torch.xlogy(shares, shares) - torch.xlogy(shares, floor)).sum(1).clamp_min(0)


@dataclass(frozen=True)
class BrierParts:
    """The Brier score, reliability - resolution + uncertainty + within."""

    reliability: float
    resolution: float
    uncertainty: float
    within: float

    @property
    def brier(self) -> float:
        """The whole."""
        return self.reliability - self.resolution + self.uncertainty + self.within


def brier_parts(probs: Tensor, target: Tensor, bins: int = BINS) -> BrierParts:
    """The parts of the Brier score of `[B, C, ...]`, by bins of equal width.

    Example:
        >>> parts = brier_parts(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> parts.reliability, parts.resolution, parts.uncertainty
        (0.5, 0.0, 0.5)
    """
    squares = brier(probs, target)
    return decompose(classwise_sums(probs, target, bins), squares.double().mean().item())


def decompose(sums: Tensor, score: float) -> BrierParts:
    """The parts of a mean Brier score, by the sums `[3, C, bins]` of `classwise_sums`."""
    counts, said, true = sums
    total = counts.sum(1, keepdim=True)
    held = counts.clamp_min(1)
    rate = true.sum(1, keepdim=True) / total
    reliability = (counts / total * ((said - true) / held).square()).sum().item()
    resolution = (counts / total * (true / held - rate).square()).sum().item()
    uncertainty = (rate * (1 - rate)).sum().item()
    within = score - (reliability - resolution + uncertainty)
    return BrierParts(reliability, resolution, uncertainty, within)
