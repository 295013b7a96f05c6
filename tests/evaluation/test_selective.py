"""Selective prediction against sums over all orders of ties."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import judged
from torch import Tensor

from bayesify import DataError, SettingError
from bayesify.evaluation.selective import (
    accuracy_at_coverage,
    accuracy_by_uncertainty,
    aurc,
    choose_threshold,
    risk_coverage,
)

Judged = tuple[Tensor, Tensor]


def in_order(case: Judged) -> np.ndarray:
    """Mistakes by rising uncertainty, those of equal uncertainty averaged."""
    uncertainty, right = case[0].numpy(), case[1].numpy()
    wrong = np.array([1 - right[uncertainty == u].mean() for u in uncertainty])
    return wrong[np.argsort(uncertainty, kind="stable")]


@given(judged())
def test_aurc_is_the_mean_risk(case: Judged) -> None:
    wrong = in_order(case)
    expected = np.mean([wrong[:k].mean() for k in range(1, len(wrong) + 1)])
    assert aurc(*case) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=5))
def test_ties_count_as_the_mean_over_their_orders(pairs: list[tuple[int, bool]]) -> None:
    orders = [o for o in permutations(pairs) if [u for u, _ in o] == sorted(u for u, _ in o)]
    risks = [
        np.mean([np.mean([not right for _, right in order[:k]]) for k in range(1, len(pairs) + 1)])
        for order in orders
    ]
    uncertainty, right = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert aurc(uncertainty, right) == pytest.approx(np.mean(risks), abs=1e-6)


@given(judged(), st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.95]))
def test_accuracy_at_coverage(case: Judged, coverage: float) -> None:
    wrong = in_order(case)
    answered = next(k for k in range(1, len(wrong) + 1) if k / len(wrong) >= coverage - 1e-12)
    expected = 1 - wrong[:answered].mean()
    assert accuracy_at_coverage(*case, coverage) == pytest.approx(expected, abs=1e-6)


@given(judged(), st.sampled_from([1, 3, 10]))
def test_buckets(case: Judged, buckets: int) -> None:
    expected = 1 - in_order(case).repeat(buckets).reshape(buckets, -1).mean(1)
    found = accuracy_by_uncertainty(*case, buckets)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@given(judged())
def test_curve(case: Judged) -> None:
    uncertainty, right = case
    curve = risk_coverage(*case)
    assert curve.threshold.tolist() == sorted(set(uncertainty.tolist()))
    for threshold, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        answered = uncertainty <= threshold
        assert coverage.item() == pytest.approx(answered.double().mean().item())
        assert risk.item() == pytest.approx(1 - right[answered].double().mean().item())


@given(judged(), st.sampled_from([0.01, 0.1, 0.3, 0.7]))
def test_threshold_covers_most_at_the_risk(case: Judged, risk: float) -> None:
    uncertainty, right = case
    allowed = [
        u for u in uncertainty.tolist() if (~right)[uncertainty <= u].double().mean() <= risk
    ]
    if not allowed:
        with pytest.raises(DataError, match="no threshold keeps the risk at"):
            choose_threshold(*case, risk)
        return
    found = choose_threshold(*case, risk)
    answered = uncertainty <= found.value
    assert found.value == max(allowed)
    assert found.risk == pytest.approx(1 - right[answered].double().mean().item())
    assert found.coverage == pytest.approx(answered.double().mean().item())


def simulated(size: int, seed: int) -> Judged:
    """Answers that are wrong with a probability equal to half their uncertainty."""
    generator = torch.Generator().manual_seed(seed)
    uncertainty = torch.rand(size, generator=generator, dtype=torch.float64)
    return uncertainty, torch.rand(size, generator=generator) > uncertainty / 2


def test_a_confident_threshold_keeps_its_promise_on_new_data() -> None:
    # Below T the true risk is T / 4, so that a risk of 0.1 allows T = 0.4.
    plain = [choose_threshold(*simulated(4000, s), 0.1).value for s in range(200)]
    sure = [choose_threshold(*simulated(4000, s), 0.1, confidence=0.9) for s in range(200)]
    broken = np.mean([found.value > 0.4 for found in sure])
    assert broken <= 0.1 + 3 * np.sqrt(0.09 / 200)
    assert np.mean([value > 0.4 for value in plain]) > 0.4
    assert all(found.bound <= 0.1 for found in sure)
    assert np.mean([found.value for found in sure]) > 0.25


def test_confidence_needs_data() -> None:
    case = torch.arange(5.0), torch.ones(5)
    assert choose_threshold(*case, 0.1).coverage == 1
    with pytest.raises(DataError, match="with a confidence of 0.95.*more validation data"):
        choose_threshold(*case, 0.1, confidence=0.95)


def test_known_values() -> None:
    uncertainty, right = torch.arange(10.0), torch.arange(10) < 8
    assert accuracy_at_coverage(uncertainty, right, 0.8) == 1
    assert accuracy_at_coverage(uncertainty, right, 0.9) == pytest.approx(8 / 9)
    assert accuracy_by_uncertainty(uncertainty, right).tolist() == [1] * 8 + [0] * 2
    assert aurc(uncertainty, right) == pytest.approx((1 / 9 + 2 / 10) / 10)
    assert aurc(uncertainty, torch.ones(10)) == 0
    assert aurc(uncertainty, torch.zeros(10)) == pytest.approx(1)


def test_wrong_input_is_named() -> None:
    for measure in (aurc, accuracy_at_coverage, accuracy_by_uncertainty, risk_coverage):
        with pytest.raises(DataError, match="NaN, 1 of 2"):
            measure(torch.tensor([torch.nan, 1.0]), torch.tensor([1, 0]))
        with pytest.raises(DataError, match="empty"):
            measure(torch.zeros(0), torch.zeros(0))
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(SettingError, match=f"risk={share}"):
            choose_threshold(torch.ones(2), torch.ones(2), share)
        with pytest.raises(SettingError, match=f"coverage={share}"):
            accuracy_at_coverage(torch.ones(2), torch.ones(2), share)
