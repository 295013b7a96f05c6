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
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.evaluation.calibration import BINS, bin_of
from bayesify.evaluation.checks import alike, count, flags, numbers, probabilities, share
from bayesify.posterior import key

RESAMPLES = 1000
LEVEL = 0.95
LARGEST = 1 << 21  # weights in memory at a time

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
    return int(low > 0) - int(high < 0)


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


def aurc_of(uncertainty: Tensor, correct: Tensor) -> Measure:
    """The area under the risk-coverage curve."""
    ranked = Ranked.by(uncertainty, ~flags("correct", correct))
    # digamma(k + 1) for whole k: sums of 1 / (before + j) are differences of these.
    table = torch.digamma(torch.arange(len(uncertainty) + 1, dtype=torch.float64) + 1)

    def measure(weights: Tensor) -> Tensor:
        plain, wrong = ranked.cumulate(weights)
        answered = plain + wrong
        size, mistakes = _steps(answered), _steps(wrong)
        before = answered - size
        rate = mistakes / size.clamp_min(1)
        harmonic = table[answered.long()] - table[before.long()]
        risks = rate * size + (wrong - mistakes - rate * before) * harmonic
        return risks.sum(1) / answered[:, -1]

    return measure


def accuracy_at_coverage_of(uncertainty: Tensor, correct: Tensor, coverage: float) -> Measure:
    """Accuracy on the surest share of the examples, rounded up to whole ones."""
    ranked = Ranked.by(uncertainty, ~flags("correct", correct))
    asked = max(1, math.ceil(share("coverage", coverage) * len(uncertainty) - 1e-9))

    def measure(weights: Tensor) -> Tensor:
        plain, wrong = ranked.cumulate(weights)
        answered = plain + wrong
        at = torch.full((len(weights), 1), float(asked), dtype=torch.float64)
        last = torch.searchsorted(answered, at)
        ends, mistakes, size, missed = (
            values.gather(1, last).squeeze(1)
            for values in (answered, wrong, _steps(answered), _steps(wrong))
        )
        return 1 - (mistakes - (ends - asked) / size * missed) / asked

    return measure


# Measures of two sets, whose weights stand side by side


def auroc_of(inside: Tensor, outside: Tensor) -> Measure:
    """The area under the ROC curve."""
    ranked = Ranked.between(inside, outside)

    def measure(weights: Tensor) -> Tensor:
        known, strange = ranked.cumulate(weights)
        below = known - _steps(known) / 2
        return (_steps(strange) * below).sum(1) / (known[:, -1] * strange[:, -1])

    return measure


def aupr_of(inside: Tensor, outside: Tensor) -> Measure:
    """Average precision, outside being what is sought."""
    ranked = Ranked.between(-inside, -outside)

    def measure(weights: Tensor) -> Tensor:
        known, strange = ranked.cumulate(weights)
        precision = strange / (known + strange).clamp_min(1)
        return (_steps(strange) * precision).sum(1) / strange[:, -1]

    return measure


def fpr95_of(inside: Tensor, outside: Tensor) -> Measure:
    """The share of inside that is flagged where 95 % of outside is."""
    ranked = Ranked.between(-inside, -outside)

    def measure(weights: Tensor) -> Tensor:
        known, strange = ranked.cumulate(weights)
        needed = torch.ceil(95 * strange[:, -1:] / 100 - 1e-9)
        cut = torch.searchsorted(strange, needed)
        return known.gather(1, cut).squeeze(1) / known[:, -1]

    return measure


@dataclass(frozen=True)
class Ranked:
    """Examples in the order of a score, of which some have a flag.

    Args:
        order: The examples by rising score, `[n]`.
        ends: Where in that order each group of equal scores ends, `[G]`.
        flag: Which examples have it, `[n]`.
    """

    order: Tensor
    ends: Tensor
    flag: Tensor

    @staticmethod
    def by(score: Tensor, flag: Tensor) -> "Ranked":
        """Ranks examples."""
        wide = numbers("score", score.flatten(), finite=False)
        alike(score=wide, flag=flag)
        ordered, order = wide.sort(stable=True)
        last = torch.ones(len(ordered), dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        return Ranked(order, last.nonzero().flatten(), flag.double())

    @staticmethod
    def between(inside: Tensor, outside: Tensor) -> "Ranked":
        """Ranks two sets together; those outside have the flag."""
        score = torch.cat([inside.flatten(), outside.flatten()])
        return Ranked.by(score, torch.arange(len(score)) >= inside.numel())

    def cumulate(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weight without and with the flag up to the end of each group, `[R, G]` each."""
        flagged = weights * self.flag
        plain, marked = (
            part[:, self.order].cumsum(1)[:, self.ends] for part in (weights - flagged, flagged)
        )
        return plain, marked


def _steps(cumulated: Tensor) -> Tensor:
    """What each group adds."""
    return cumulated.diff(dim=1, prepend=torch.zeros_like(cumulated[:, :1]))


def _weights(size: int, rows: int, generator: torch.Generator) -> Tensor:
    """How often each of `size` examples is in each of `rows` resamples."""
    drawn = torch.randint(size, (rows, size), generator=generator)
    place = drawn + size * torch.arange(rows).unsqueeze(1)
    return torch.bincount(place.flatten(), minlength=rows * size).view(rows, size).double()
