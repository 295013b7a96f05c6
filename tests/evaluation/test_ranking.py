"""Groups of equal scores, and bins that keep their order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesify import SettingError
from bayesify.evaluation.ranking import bits_of, cumulate, edges, group, grouped, place, run

numbers = st.one_of(
    st.floats(allow_nan=False, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])
)


@given(st.lists(numbers, min_size=1, max_size=40), st.sampled_from([1 << 10, 1 << 16, 1 << 20]))
def test_bins_keep_the_order(values: list[float], bins: int) -> None:
    score = torch.tensor(values)
    bin_of = place(score, bins)
    assert 0 <= bin_of.min() <= bin_of.max() < bins
    ahead = score[:, None] < score
    assert (bin_of[:, None] <= bin_of)[ahead].all()
    assert (bin_of[:, None] == bin_of)[score[:, None] == score].all()


@given(st.floats(1e-30, 1e30), st.sampled_from([10, 16, 24]))
def test_a_relative_difference_is_told_apart(value: float, bits: int) -> None:
    low = torch.tensor([value], dtype=torch.float64).float().double()
    high = low * (1 + 1.01 * 2 ** (9 - bits))
    both = place(torch.stack([low, high]).float(), 1 << bits).flatten()
    assert both[0] < both[1]
    both = place(torch.stack([-high, -low]).float(), 1 << bits).flatten()
    assert both[0] < both[1]


@given(st.floats(-1e30, 1e30))
def test_scores_lie_between_the_edges_of_their_bins(value: float) -> None:
    bins = 1 << 16
    score = torch.tensor([value])
    limits, at = edges(bins), place(score, bins)
    assert limits[at] <= score <= limits[at + 1]
    assert (limits.diff() >= 0).all()


def test_counts_of_bins_are_counts_of_groups() -> None:
    score = torch.tensor([0.5, 0.25, 0.5, -2.0, 0.5])
    flag = torch.tensor([True, False, False, True, True])
    bins = 1 << 12
    exact, at = group(score, flag), place(score, bins)
    binned = grouped(*(torch.bincount(at[f], minlength=bins) for f in (~flag, flag)))
    assert torch.equal(exact.plain, binned.plain)
    assert torch.equal(exact.flagged, binned.flagged)
    assert ((binned.score - exact.score).abs() <= binned.width / 2).all()


def test_groups_split_in_two() -> None:
    groups = group(torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([True, True, False, False]))
    first = groups.split(flagged_first=True)
    assert first.flagged.tolist() == [2, 0, 0]
    assert first.plain.tolist() == [0, 1, 1]
    last = groups.split(flagged_first=False)
    assert last.flagged.tolist() == [0, 2, 0]
    assert last.plain.tolist() == [1, 0, 1]


@given(st.floats(-5, 5), st.floats(-2, 2), st.integers(0, 10**6), st.integers(0, 200))
def test_closed_sum(first: float, slope: float, before: int, steps: int) -> None:
    given_ = (torch.tensor([float(v)], dtype=torch.float64) for v in (first, slope, before, steps))
    expected = sum((first + slope * j) / (before + j) for j in range(1, steps + 1))
    assert run(*given_).item() == pytest.approx(expected, abs=1e-6)


def test_cumulative_counts_run_linearly_through_a_group() -> None:
    values, counts = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 6.0])
    at = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0])
    assert cumulate(values, counts, at).tolist() == [0, 0.5, 1, 2, 4]


@pytest.mark.parametrize("bins", [0, -4, 1000, 1 << 9, 1 << 25])
def test_bins_are_a_power_of_two(bins: int) -> None:
    with pytest.raises(SettingError, match=f"bins={bins} must be a power of two from 1024"):
        bits_of(bins)
