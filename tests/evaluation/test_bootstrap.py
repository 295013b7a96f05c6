"""Measures of weights agree with the measures themselves; intervals cover what they should."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bayesify.errors import DataError, SettingError
from bayesify.evaluation import bootstrap
from bayesify.evaluation.calibration import adaptive_calibration_error, calibration_error
from bayesify.evaluation.detection import aupr, aupr_inside, auroc, fpr95
from bayesify.evaluation.selective import accuracy_at_coverage, aurc


def answers(seed: int, size: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scores with ties in [0, 1], and flags."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, levels + 1, (size,), generator=generator) / levels
    return score, torch.rand(size, generator=generator) < 0.7


def drawn(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A resample: which examples, and the same as weights."""
    rows = torch.randint(size, (size,), generator=torch.Generator().manual_seed(seed))
    return rows, torch.bincount(rows, minlength=size).double()


@given(st.integers(0, 1000), st.integers(1, 40), st.sampled_from([1, 3, 1000]))
def test_weights_stand_for_a_resample_of_one_set(seed: int, size: int, levels: int) -> None:
    score, flag = answers(seed, size, levels)
    rows, weights = drawn(size, seed + 1)
    pairs = {
        "mean": (bootstrap.mean_of(score), score[rows].double().mean().item()),
        "root": (bootstrap.root_mean_of(score), score[rows].double().mean().sqrt().item()),
        "ece": (
            bootstrap.calibration_error_of(score, flag),
            calibration_error(score[rows], flag[rows]),
        ),
        "adaptive ece": (
            bootstrap.adaptive_calibration_error_of(score, flag),
            adaptive_calibration_error(score[rows], flag[rows]),
        ),
        "aurc": (bootstrap.aurc_of(bootstrap.Ranked(score, ~flag)), aurc(score[rows], flag[rows])),
        "at 80": (
            bootstrap.accuracy_at_coverage_of(bootstrap.Ranked(score, ~flag), 0.8),
            accuracy_at_coverage(score[rows], flag[rows], 0.8),
        ),
    }
    for name, (measure, expected) in pairs.items():
        assert measure(weights[None]).item() == pytest.approx(expected, abs=1e-9), name


@given(st.integers(0, 1000), st.integers(1, 30), st.integers(1, 30), st.sampled_from([1, 3, 1000]))
def test_weights_stand_for_a_resample_of_two_sets(
    seed: int, inside: int, outside: int, levels: int
) -> None:
    known, strange = answers(seed, inside, levels)[0], answers(seed + 1, outside, levels)[0]
    (rows, first), (others, second) = drawn(inside, seed + 2), drawn(outside, seed + 3)
    weights = torch.cat([first, second])[None]
    sets = bootstrap.Ranked.between(known, strange)
    for of, measure in (
        (bootstrap.auroc_of, auroc),
        (bootstrap.aupr_of, aupr),
        (bootstrap.aupr_inside_of, aupr_inside),
        (bootstrap.fpr95_of, fpr95),
    ):
        expected = measure(known[rows], strange[others])
        assert of(sets)(weights).item() == pytest.approx(expected, abs=1e-6)


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = torch.randn(2000)
    samples = bootstrap.resample({"mean": bootstrap.mean_of(values)}, [2000])["mean"]
    low, high = bootstrap.interval(samples)
    error = values.std().item() / 2000**0.5
    assert low == pytest.approx(values.mean().item() - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(values.mean().item() + 1.96 * error, abs=0.25 * error)


def test_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    monkeypatch.setattr(bootstrap, "LARGEST", 100)

    def measure(weights: Tensor) -> Tensor:
        sizes.append(weights.numel())
        return weights.sum(1)

    found = bootstrap.resample({"sum": measure}, [20, 5], resamples=10)["sum"]
    assert found.tolist() == [25] * 10
    assert max(sizes) == 100


def test_two_alike_differ_by_noise_only_and_a_pair_tells_more_than_two_intervals() -> None:
    values = torch.randn(300)
    better = values + 0.02 + 0.01 * torch.randn(300)
    measures = {"first": bootstrap.mean_of(values), "second": bootstrap.mean_of(better)}
    samples = bootstrap.resample(measures, [300])
    assert bootstrap.differs(samples["first"], samples["first"]) == 0
    assert bootstrap.interval(samples["first"])[1] > bootstrap.interval(samples["second"])[0]
    assert bootstrap.differs(samples["second"], samples["first"]) == 1
    assert bootstrap.differs(samples["first"], samples["second"]) == -1
    rounded = samples["first"] * (1 - 1e-6)
    assert bootstrap.differs(rounded, samples["first"]) == 0


def test_the_seed_decides() -> None:
    measures = {"mean": bootstrap.mean_of(torch.randn(50))}
    one, same, other = (bootstrap.resample(measures, [50], seed=s)["mean"] for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_an_order_is_summed_once_for_all_its_measures() -> None:
    mistakes = bootstrap.Ranked(torch.rand(20), torch.rand(20) < 0.5)
    weights, others = torch.ones(3, 20).double(), 2 * torch.ones(3, 20).double()
    assert mistakes.cumulate(weights) is mistakes.cumulate(weights)
    assert mistakes.cumulate(others).plain[0, -1] == 2 * mistakes.cumulate(weights).plain[0, -1]


def test_what_cannot_be_resampled_is_said() -> None:
    with pytest.raises(DataError, match="NaN"):
        bootstrap.mean_of(torch.tensor([float("nan")]))
    with pytest.raises(SettingError, match="resamples=0"):
        bootstrap.resample({}, [3], resamples=0)
