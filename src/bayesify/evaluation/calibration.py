r"""Whether a confidence means what it says.

In bins of confidence, the mean confidence and the accuracy should be the same. The expected
calibration error is their mean gap (Guo et al., *On Calibration of Modern Neural Networks*, ICML
2017, https://arxiv.org/abs/1706.04599), and as every bin counts by its size,

$$ECE = \frac{1}{n} \sum_k |\sum_{i \in k} (correct_i - confidence_i)|,$$

so that two sums and a count a bin are all there is to keep. Bins are $[k/K, (k+1)/K)$, the last one
closed. torchmetrics' `CalibrationError` keeps every prediction, and puts a confidence of 1, which
float32 rounds many to, into a bin of its own.

Adaptive: bins of equal mass instead of equal width (Nguyen and O'Connor, EMNLP 2015). Classwise:
the mean over classes of the error of each class's probability (Kull et al., NeurIPS 2019,
https://arxiv.org/abs/1910.12656).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.evaluation.checks import alike, classes, count, flags, probabilities
from bayesify.evaluation.ranking import Groups, borders, cumulate, group

BINS = 15


@dataclass(frozen=True)
class ReliabilityCurve:
    """Bins that hold an example, by rising confidence.

    Args:
        confidence: Mean confidence, `[K]`.
        accuracy: Share of right answers, `[K]`.
        count: Examples, `[K]`.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal bins.

    Example:
        >>> round(calibration_error(torch.tensor([0.8, 0.8]), torch.tensor([True, False])), 6)
        0.3
    """
    return gap(bin_sums(confidence, correct, bins)).item()


def classwise_calibration_error(probs: Tensor, target: Tensor, bins: int = BINS) -> float:
    """Mean over classes of the gap between a class's probability `[B, C, ...]` and frequency."""
    return gap(classwise_sums(probs, target, bins)).mean().item()


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, parts: int = BINS) -> float:
    """Calibration error over `parts` bins with equally many examples each.

    An example that lies across a border counts on both sides by its share, and so do ties: the
    result does not depend on their order.
    """
    alike(confidence=confidence, correct=correct)
    doubt = 1 - probabilities("confidence", confidence)
    return gap(equal_mass_sums(group(doubt, correct), parts)).item()


def reliability_curve(confidence: Tensor, correct: Tensor, bins: int = BINS) -> ReliabilityCurve:
    """Accuracy against confidence, in equal bins.

    Example:
        >>> curve = reliability_curve(torch.tensor([0.8, 0.8]), torch.tensor([True, False]))
        >>> curve.accuracy, curve.count
        (tensor([0.5000], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    return curve_of(bin_sums(confidence, correct, bins))


# All of these are made of sums [3, ..., bins]: of examples, of confidence, of right answers.


def bin_sums(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """Sums by equal bins of confidence, `[3, bins]`."""
    alike(confidence=confidence, correct=correct)
    said = probabilities("confidence", confidence).flatten()
    return _sums(said, flags("correct", correct).flatten(), bin_of(said, bins), bins)


def classwise_sums(probs: Tensor, target: Tensor, bins: int = BINS) -> Tensor:
    """Sums by equal bins of each class's probability, `[3, C, bins]`."""
    probs, target = classes(probs, target)
    number = probs.shape[1]
    said = probabilities("probs", probs.movedim(1, -1)).reshape(-1, number)
    true = one_hot(target.flatten().cpu(), number)
    place = bin_of(said, bins) + bins * torch.arange(number)
    sums = _sums(said.flatten(), true.flatten(), place.flatten(), bins * number)
    return sums.unflatten(1, (number, bins))


def equal_mass_sums(groups: Groups, parts: int = BINS) -> Tensor:
    """Sums by parts of equal mass, `[3, parts]`, of groups by doubt whose flag is to be right."""
    said = groups.count * (1 - groups.score)
    at = borders(groups, parts)
    return torch.stack(
        [cumulate(v, groups.count, at).diff() for v in (groups.count, said, groups.flagged)]
    )


def equal_mass_error(groups: Groups, parts: int = BINS) -> float:
    """By how much bins of doubt can mislead an adaptive calibration error, at the most.

    A confidence is within half a bin's width of what is taken for it. A border that cuts a bin may
    have more or fewer of the bin's right answers below it than by proportion: at most all, at least
    what does not fit above. Both parts beside it are then wrong by the difference.
    """
    at = borders(groups, parts)[1:-1]
    ends = groups.count.cumsum(0)
    cut = torch.searchsorted(ends, at)
    size, right = groups.count[cut], groups.flagged[cut]
    below = at - (ends[cut] - size)
    even = below * right / size
    most, least = torch.minimum(below, right), (below - (size - right)).clamp_min(0)
    astray = torch.where(groups.width[cut] > 0, torch.maximum(most - even, even - least), 0.0)
    spread = (groups.count * groups.width).sum() / 2
    return ((spread + 2 * astray.sum()) / ends[-1]).item()


def gap(sums: Tensor) -> Tensor:
    """The calibration error of sums `[3, ..., bins]`, `[...]`."""
    counts, said, right = sums
    return (right - said).abs().sum(-1) / counts.sum(-1)


def curve_of(sums: Tensor) -> ReliabilityCurve:
    """Means of sums `[3, bins]`, for bins that hold something."""
    counts, said, right = sums[:, sums[0] > 0]
    return ReliabilityCurve(said / counts, right / counts, counts)


def bin_of(said: Tensor, bins: int) -> Tensor:
    """The bin of each probability."""
    inner = torch.arange(1, count("bins", bins), dtype=torch.float64) / bins
    return torch.bucketize(said, inner, right=True)


def _sums(said: Tensor, right: Tensor, place: Tensor, bins: int) -> Tensor:
    weights = (torch.ones_like(said), said, right.double())
    return torch.stack([torch.bincount(place, weight, minlength=bins) for weight in weights])
