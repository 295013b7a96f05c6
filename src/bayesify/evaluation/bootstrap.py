r"""How far a measure would move on other data of the same kind: the bootstrap.

A test set of n examples is drawn again, n times with replacement, a thousand times over; the
middle 95 % of what a measure then says are its interval (Efron and Tibshirani, *An Introduction to
the Bootstrap*, 1993). Drawing with replacement gives each example a whole weight, so that every
measure here is a function of weights `[R, n]`, all resamples at once.

The weights depend on the seed and the sizes alone. Two methods that answered the same examples are
compared resample by resample: what the examples themselves have of luck is in both, and the
interval of the difference is narrower than those of the two.

Where sets are told apart, each of the two is resampled by itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.evaluation.calibration import BINS, bin_of
from bayesify.evaluation.checks import alike, count, flags, numbers, probabilities, share
from bayesify.posterior import key

RESAMPLES = 1000
LEVEL = 0.95
ROUNDING = 1e-4  # of a measure, by which it may move where draws that are all the same are averaged
LARGEST = 1 << 18  # weights in memory at a time

Measure = Callable[[Tensor], Tensor]
"""A function of weights `[R, n]`, of all examples, with a number for each resample, `[R]`."""


def resample(
    measures: Mapping[str, Measure],
    sizes: Sequence[int],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Tensor]:
    """What each measure says on each of the resamples, `[resamples]`.

    Args:
        measures: Of the examples of all sets, one set after the other.
        sizes: How many examples each set has; each is resampled by itself.
        seed: One seed, one result; the same resamples for all measures and methods.
        resamples: How many.

    Example:
        >>> found = resample({"mean": mean_of(torch.ones(5))}, [5], resamples=3)
        >>> found["mean"]
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    generator = torch.Generator().manual_seed(key("bootstrap", seed))
    found: dict[str, list[Tensor]] = {name: [] for name in measures}
    step = max(1, LARGEST // sum(sizes))
    for start in range(0, count("resamples", resamples), step):
        rows = min(step, resamples - start)
        weights = torch.cat([_weights(size, rows, generator) for size in sizes], dim=1)
        for name, measure in measures.items():
            found[name].append(measure(weights))
    return {name: torch.cat(values) for name, values in found.items()}


def interval(samples: Tensor, level: float = LEVEL) -> tuple[float, float]:
    """The middle `level` of the resamples' values.

    Example:
        >>> interval(torch.arange(5.0), 0.5)
        (1.0, 3.0)
    """
    tail = (1 - share("level", level)) / 2
    at = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = torch.quantile(numbers("samples", samples), at).tolist()
    return low, high


def differs(samples: Tensor, baseline: Tensor, level: float = LEVEL) -> int:
    """Whether a measure is higher (1) or lower (-1) than the baseline's, or within noise (0).

    Args:
        samples: What a measure says on each resample.
        baseline: What it says of the baseline on the same resamples.
        level: How sure that must be.

    Example:
        >>> differs(torch.tensor([0.5, 0.7]), torch.tensor([0.4, 0.6]))
        1
    """
    alike(samples=samples, baseline=baseline)
    low, high = interval(samples - baseline, level)
    slack = ROUNDING * baseline.double().abs().mean().item()
    return int(low > slack) - int(high < -slack)


# Measures of one set


def mean_of(values: Tensor) -> Measure:
    """The mean of a number an example: accuracy, NLL, Brier score."""
    wide = numbers("values", values.flatten())
    return lambda weights: weights @ wide / weights.sum(1)


def root_mean_of(squares: Tensor) -> Measure:
    """The root of a mean: RMSE."""
    mean = mean_of(squares)
    return lambda weights: mean(weights).sqrt()


def calibration_error_of(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Measure:
    """The expected calibration error over equal bins."""
    alike(confidence=confidence, correct=correct)
    said = probabilities("confidence", confidence)
    gaps = torch.zeros(len(said), bins, dtype=torch.float64)
    over = flags("correct", correct).double() - said
    gaps[torch.arange(len(said)), bin_of(said, bins)] = over
    return lambda weights: (weights @ gaps).abs().sum(1) / weights.sum(1)


def adaptive_calibration_error_of(
    confidence: Tensor, correct: Tensor, parts: int = BINS
) -> Measure:
    """The calibration error over bins with equally many examples each."""
    said = probabilities("confidence", confidence)
    answers = Ranked(1 - said, correct)
    claimed = said[answers.order[answers.ends]]
    borders = torch.arange(1, count("parts", parts) + 1, dtype=torch.float64) / parts

    def measure(weights: Tensor) -> Tensor:
        wrong, wrong_here, right, right_here = answers.cumulate(weights)
        ends, here = wrong + right, wrong_here + right_here
        over_here = right_here - here * claimed
        at = ends[:, -1:] * borders
        last = torch.searchsorted(ends, at)
        # A group that lies across a border counts on both sides by its share.
        beyond = (ends.gather(1, last) - at) / here.gather(1, last)
        over = over_here.cumsum(1).gather(1, last) - beyond * over_here.gather(1, last)
        return over.diff(dim=1, prepend=torch.zeros_like(at[:, :1])).abs().sum(1) / ends[:, -1]

    return measure


# Measures of an order, which several may share


class Ranked:
    """Examples in the order of a score, of which some have a flag.

    Args:
        score: Of each example, `[n]`; equal ones make a group.
        flag: Which examples have it, `[n]`.
    """

    def __init__(self, score: Tensor, flag: Tensor) -> None:
        self.score = numbers("score", score.flatten(), finite=False)
        alike(score=self.score, flag=flag)
        ordered, self.order = self.score.sort(stable=True)
        last = torch.ones(len(ordered), dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        self.ends = last.nonzero().flatten()
        self.flag = flags("flag", flag).double()
        self._last: tuple[Tensor, Cumulated] | None = None

    @staticmethod
    def between(inside: Tensor, outside: Tensor) -> "Ranked":
        """Two sets together; those outside have the flag."""
        score = torch.cat([inside.flatten(), outside.flatten()])
        return Ranked(score, torch.arange(len(score)) >= inside.numel())

    def turned(self) -> "Ranked":
        """The same examples in the opposite order; the others have the flag."""
        return Ranked(-self.score, self.flag == 0)

    def __len__(self) -> int:
        return len(self.order)

    def cumulate(self, weights: Tensor) -> "Cumulated":
        """Sums of weights by group; those of the last weights are kept for the next measure."""
        if self._last is None or self._last[0] is not weights:
            flagged = weights * self.flag
            ends = (
                part[:, self.order].cumsum(1)[:, self.ends] for part in (weights - flagged, flagged)
            )
            sums = ((end, end.diff(dim=1, prepend=torch.zeros_like(end[:, :1]))) for end in ends)
            (plain, plain_here), (marked, marked_here) = sums
            self._last = weights, Cumulated(plain, plain_here, marked, marked_here)
        return self._last[1]


class Cumulated(NamedTuple):
    """Weight without and with the flag, up to the end of each group and in it, `[R, G]` each."""

    plain: Tensor
    plain_here: Tensor
    flagged: Tensor
    flagged_here: Tensor


def aurc_of(mistakes: Ranked) -> Measure:
    """The area under the risk-coverage curve, by rising uncertainty; mistakes have the flag."""
    # digamma(k + 1) for whole k: sums of 1 / (before + j) are differences of these.
    table = torch.digamma(torch.arange(len(mistakes) + 1, dtype=torch.float64) + 1)

    def measure(weights: Tensor) -> Tensor:
        right, right_here, wrong, wrong_here = mistakes.cumulate(weights)
        answered, size = right + wrong, right_here + wrong_here
        before = answered - size
        rate = wrong_here / size.clamp_min(1)
        harmonic = table[answered.long()] - table[before.long()]
        risks = rate * size + (wrong - wrong_here - rate * before) * harmonic
        return risks.sum(1) / answered[:, -1]

    return measure


def accuracy_at_coverage_of(mistakes: Ranked, coverage: float) -> Measure:
    """Accuracy on the surest share of the examples, rounded up to whole ones."""
    asked = max(1, math.ceil(share("coverage", coverage) * len(mistakes) - 1e-9))

    def measure(weights: Tensor) -> Tensor:
        right, right_here, wrong, wrong_here = mistakes.cumulate(weights)
        answered = right + wrong
        at = torch.full((len(weights), 1), float(asked), dtype=torch.float64)
        last = torch.searchsorted(answered, at)
        ends, missed, kept_here, missed_here = (
            values.gather(1, last).squeeze(1)
            for values in (answered, wrong, right_here, wrong_here)
        )
        beyond = (ends - asked) / (kept_here + missed_here)
        return 1 - (missed - beyond * missed_here) / asked

    return measure


def auroc_of(sets: Ranked) -> Measure:
    """The area under the ROC curve of two sets; those outside have the flag."""

    def measure(weights: Tensor) -> Tensor:
        known, known_here, strange, strange_here = sets.cumulate(weights)
        won = (strange_here * (known - known_here / 2)).sum(1)
        return won / (known[:, -1] * strange[:, -1])

    return measure


def aupr_of(sets: Ranked) -> Measure:
    """Average precision, outside being what is sought."""

    def measure(weights: Tensor) -> Tensor:
        known, known_here, strange, strange_here = sets.cumulate(weights)
        true = strange[:, -1:] - strange + strange_here
        false = known[:, -1:] - known + known_here
        return (strange_here * true / (true + false).clamp_min(1)).sum(1) / strange[:, -1]

    return measure


def aupr_inside_of(sets: Ranked) -> Measure:
    """Average precision of the order turned round, inside being what is sought."""
    return aupr_of(sets.turned())


def fpr95_of(sets: Ranked) -> Measure:
    """The share of inside that is flagged where 95 % of outside is."""

    def measure(weights: Tensor) -> Tensor:
        known, known_here, strange, strange_here = sets.cumulate(weights)
        total = strange[:, -1:]
        spared = total - torch.ceil(95 * total / 100 - 1e-9)
        # The last group below which no more of outside lies than may be missed.
        cut = torch.searchsorted(strange - strange_here, spared, right=True) - 1
        passed = (known - known_here).gather(1, cut).squeeze(1)
        return 1 - passed / known[:, -1]

    return measure


def _weights(size: int, rows: int, generator: torch.Generator) -> Tensor:
    """How often each of `size` examples is in each of `rows` resamples."""
    drawn = torch.randint(size, (rows, size), generator=generator)
    place = drawn + size * torch.arange(rows).unsqueeze(1)
    return torch.bincount(place.flatten(), minlength=rows * size).view(rows, size).double()
