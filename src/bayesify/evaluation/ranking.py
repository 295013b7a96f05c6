r"""Examples in the order of a score, with ties kept together.

A measure that depends on the order alone needs, for every score that occurs, how many examples have
it with a flag and how many without: a *group*. Within a group no order is known, and what a measure
says must not depend on the order in which ties happen to lie: cumulative counts run linearly
through a group, which is their mean over all of its orders.

Where memory is bounded, scores fall into bins, which are groups too, though of scores that do
differ. Bins are those of a floating-point number cut to its leading bits: one for the sign, eight
for the exponent, the others for the mantissa. They need no range, put zero and all magnitudes in
order, and are the same in every process. With $2^b$ bins, two scores of a relative difference above
$2^{9 - b}$ are always told apart. What the others can do to a result is known from the counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.errors import DataError, SettingError
from bayesify.evaluation.checks import alike, count, flags, numbers

FEWEST_BITS, MOST_BITS = 10, 24


@dataclass(frozen=True)
class Groups:
    """Counts by rising score.

    Args:
        score: Of each group, `[G]`, the middle of a bin.
        plain: Examples without the flag, `[G]`.
        flagged: Examples with it, `[G]`.
        width: By how much scores of a group may differ, `[G]`; 0 for ties.
    """

    score: Tensor
    plain: Tensor
    flagged: Tensor
    width: Tensor

    @property
    def count(self) -> Tensor:
        """Examples of each group."""
        return self.plain + self.flagged

    def split(self, *, flagged_first: bool) -> "Groups":
        """Every group as two, those with the flag before the others or after them.

        Of all the orders that the scores of a bin may have, these are the best and the worst.
        """
        none = torch.zeros_like(self.plain)
        with_flag = torch.stack([none, self.flagged])
        without = torch.stack([self.plain, none])
        first, second = (with_flag, without) if flagged_first else (without, with_flag)
        plain, flagged = torch.stack([first, second], dim=2).flatten(1)
        score, width = (value.repeat_interleave(2) for value in (self.score, self.width))
        there = plain + flagged > 0
        return Groups(score[there], plain[there], flagged[there], width[there])


def group(score: Tensor, flag: Tensor) -> Groups:
    """Groups of scores that are equal.

    Example:
        >>> found = group(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([True, False, False]))
        >>> found.score.tolist(), found.plain.tolist(), found.flagged.tolist()
        ([1.0, 2.0], [1.0, 1.0], [0.0, 1.0])

    Raises:
        DataError: If a score is NaN, there is none, or shapes differ.
    """
    alike(score=score, flag=flag)
    wide, flag = numbers("score", score.flatten(), finite=False), flags("flag", flag.flatten())
    values, place = wide.unique(return_inverse=True)
    plain, flagged = (torch.bincount(place[rows], minlength=len(values)) for rows in (~flag, flag))
    return Groups(values, plain.double(), flagged.double(), torch.zeros_like(values))


def place(score: Tensor, bins: int) -> Tensor:
    """The bin of each score, in the order of the scores.

    Example:
        >>> place(torch.tensor([-1.0, 0.0, 1.0, 1.0001, 1.1]), 1 << 16).diff() > 0
        tensor([ True,  True, False,  True])
    """
    bits = bits_of(bins)
    # Adding 0 makes a negative zero positive, or the two would be in different bins.
    raw = (numbers("score", score, finite=False).float() + 0.0).view(torch.int32)
    ordered = torch.where(raw < 0, raw ^ 0x7FFFFFFF, raw)
    return (ordered >> (32 - bits)).long() + bins // 2


def edges(bins: int) -> Tensor:
    """The lowest number of each bin and, last, the highest of all, `[bins + 1]`, in double."""
    drop = 32 - bits_of(bins)
    lowest = (torch.arange(bins + 1) - bins // 2) << drop
    ordered = lowest.clamp_max(0x7FFFFFFF).int()
    raw = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    numbers = raw.view(torch.float32).double()
    beyond = torch.where(ordered < 0, -torch.inf, torch.inf)  # bits that stand for no number
    most = torch.finfo(torch.float32).max
    return torch.where(numbers.isnan(), beyond, numbers).clamp(-most, most)


def grouped(plain: Tensor, flagged: Tensor) -> Groups:
    """Groups of counts by bin, empty bins left out.

    Raises:
        DataError: If all are empty.
    """
    there = plain + flagged > 0
    if not there.any():
        raise DataError("there is nothing to measure: no example was counted.")
    limits = edges(len(plain))
    low, high = limits[:-1][there], limits[1:][there]
    return Groups((low + high) / 2, plain[there].double(), flagged[there].double(), high - low)


def bits_of(bins: int) -> int:
    """The exponent b of 2^b bins.

    Raises:
        SettingError: If `bins` is not a power of two between 2^10 and 2^24.
    """
    bits = int(bins).bit_length() - 1
    if bins != 1 << max(bits, 0) or not FEWEST_BITS <= bits <= MOST_BITS:
        raise SettingError(
            f"bins={bins!r} must be a power of two from {1 << FEWEST_BITS} to {1 << MOST_BITS}, "
            f"such as {1 << 16}."
        )
    return bits


def cumulate(values: Tensor, counts: Tensor, at: Tensor) -> Tensor:
    """The sum of `values` over the first `at` examples, linear within a group.

    Example:
        >>> cumulate(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
        tensor([1., 2.])
    """
    ends, totals = counts.cumsum(0), values.cumsum(0)
    last = torch.searchsorted(ends, at).clamp_max(len(ends) - 1)
    missing = (ends[last] - at) / counts[last]
    return totals[last] - missing * values[last]


def borders(groups: Groups, parts: int) -> Tensor:
    """Ranks between which parts of equal mass lie, `[parts + 1]`."""
    count("parts", parts)
    steps = torch.arange(parts + 1, dtype=torch.float64)
    return steps * groups.count.sum() / parts


def run(first: Tensor, slope: Tensor, before: Tensor, steps: Tensor) -> Tensor:
    r"""$\sum_{j=1}^{steps} (first + slope \cdot j) / (before + j)$, without going through them.

    The sum of $1 / (before + j)$ is a difference of digamma functions.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> run(0 * one, one, one, 2 * one)  # 1/2 + 2/3
        tensor([1.1667], dtype=torch.float64)
    """
    harmonic = torch.digamma(before + steps + 1) - torch.digamma(before + 1)
    return slope * steps + (first - slope * before) * harmonic
