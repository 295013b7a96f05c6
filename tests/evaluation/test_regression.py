"""Measures of values against scikit-learn, scipy, torchmetrics and numerical integration."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import mean_squared_error
from torch import Tensor
from torchmetrics.functional.regression import continuous_ranked_probability_score

from bayesify import DataError, SettingError
from bayesify.evaluation.regression import (
    covered,
    crps_gaussian,
    crps_of_draws,
    gaussian_nll,
    interval,
    interval_of_draws,
    mixture_nll,
    rmse,
    width,
)


@st.composite
def values(draw: st.DrawFn, draws: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Means and standard deviations `[S, N]`, and targets, some of them the same numbers."""
    size = draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e3]))

    def numbers(*shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    means = numbers(draws, size)
    if draw(st.booleans()):
        means = means.sign() * scale
    target = means[0].clone() if draw(st.booleans()) else numbers(size)
    return means, numbers(draws, size).abs() + 0.01 * scale, target


Values = tuple[Tensor, Tensor, Tensor]


@given(values())
def test_errors_and_densities(case: Values) -> None:
    (mean,), (std,), target = case
    expected = math.sqrt(mean_squared_error(target, mean))
    assert rmse(mean, target) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    found = gaussian_nll(mean, std.square(), target)
    assert found.tolist() == pytest.approx((-norm.logpdf(target, mean, std)).tolist(), abs=1e-6)


@given(values(draws=4))
def test_mixture(case: Values) -> None:
    means, stds, target = case
    densities = norm.pdf(target, means, stds).mean(0)
    found = mixture_nll(means, stds.square(), target)
    there = densities > 1e-200  # where scipy's density does not underflow
    expected = -np.log(densities[there])
    assert found[torch.from_numpy(there)].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    one = mixture_nll(means[:1], stds[:1].square(), target)
    assert torch.allclose(one, gaussian_nll(means[0], stds[0].square(), target))
    assert torch.isfinite(mixture_nll(means, stds.square(), target + 1e6)).all()


@given(values(), st.sampled_from([0.5, 0.9, 0.95]))
def test_intervals(case: Values, level: float) -> None:
    (mean,), (std,), target = case
    low, high = interval(mean, std, level)
    expected = norm.interval(level, mean, std)
    assert low.tolist() == pytest.approx(expected[0].tolist(), rel=1e-6, abs=1e-9)
    assert high.tolist() == pytest.approx(expected[1].tolist(), rel=1e-6, abs=1e-9)
    inside = (expected[0] <= target.numpy()) & (target.numpy() <= expected[1])
    assert covered(low, high, target).tolist() == inside.tolist()
    assert width(low, high).tolist() == pytest.approx((expected[1] - expected[0]).tolist())


@given(values(draws=7), st.sampled_from([0.5, 0.9]))
def test_intervals_of_draws(case: Values, level: float) -> None:
    draws = case[0]
    expected = np.quantile(draws.numpy(), [(1 - level) / 2, (1 + level) / 2], axis=0)
    for found, wanted in zip(interval_of_draws(draws, level), expected, strict=True):
        assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "std", "target"), [(0, 1, 0), (0, 1, 2.5), (3, 0.2, 2), (-1, 4, 5), (2, 1e-3, 2.001)]
)
def test_gaussian_crps_is_its_integral(mean: float, std: float, target: float) -> None:
    below = quad(lambda z: norm.cdf(z, mean, std) ** 2, min(mean, target) - 10 * std, target)[0]
    above = quad(lambda z: norm.sf(z, mean, std) ** 2, target, max(mean, target) + 10 * std)[0]
    given_ = (torch.tensor([float(v)], dtype=torch.float64) for v in (mean, std, target))
    assert crps_gaussian(*given_).item() == pytest.approx(below + above, abs=1e-6)


@given(values(draws=6))
def test_crps_of_draws(case: Values) -> None:
    draws, _, target = case
    found = crps_of_draws(draws, target)
    expected = continuous_ranked_probability_score(draws.T, target).item()
    assert found.mean().item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for column, true, value in zip(draws.T.numpy(), target.tolist(), found.tolist(), strict=True):
        # The integral of a step function, from step to step.
        steps = np.sort([*column, true])
        inside = [(np.mean(column <= z) - (z >= true)) ** 2 for z in steps[:-1]]
        assert value == pytest.approx(np.sum(inside * np.diff(steps)), rel=1e-6, abs=1e-9)


def test_crps_of_many_draws_is_the_closed_form() -> None:
    draws = 2 + 3 * torch.randn(200_000, 1, dtype=torch.float64)
    target = torch.tensor([4.0], dtype=torch.float64)
    closed = crps_gaussian(target * 0 + 2, target * 0 + 3, target)
    assert crps_of_draws(draws, target).item() == pytest.approx(closed.item(), abs=0.02)


def test_certainty() -> None:
    mean, target = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])
    assert crps_gaussian(mean, torch.zeros(2), target).tolist() == [0.5, 0]
    assert crps_of_draws(mean.expand(1, 2), target).tolist() == [0.5, 0]
    with pytest.raises(DataError, match="variance must be above 0"):
        gaussian_nll(mean, torch.zeros(2), target)
    with pytest.raises(DataError, match="variance must be above 0"):
        mixture_nll(mean[None], torch.zeros(1, 2), target)


def test_wrong_input_is_named() -> None:
    ones, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    for measure in (gaussian_nll, crps_gaussian, covered):
        with pytest.raises(DataError, match="NaN or infinite numbers, 1 of 2"):
            measure(nan, ones, ones)
        with pytest.raises(DataError, match="shapes must agree"):
            measure(ones, ones, torch.ones(2, 1))
    for measure in (crps_of_draws, lambda d, t: mixture_nll(d, d.abs(), t)):
        with pytest.raises(DataError, match="NaN or infinite numbers, 1 of"):
            measure(torch.stack([ones, nan]), ones)
        with pytest.raises(DataError, match="target holds NaN"):
            measure(torch.ones(3, 2), nan)
        with pytest.raises(DataError, match="shapes must agree"):
            measure(torch.ones(3, 2), torch.ones(3))
    with pytest.raises(DataError, match="negative"):
        crps_gaussian(ones, -ones, ones)
    with pytest.raises(SettingError, match="level=1"):
        interval(ones, ones, 1)
