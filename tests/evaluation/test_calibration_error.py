"""Calibration errors against implementations written again, bin by bin."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import TIES, judged, predicted
from sklearn.calibration import calibration_curve
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error

from bayesify import DataError, SettingError
from bayesify.evaluation.calibration import (
    adaptive_calibration_error,
    calibration_error,
    classwise_calibration_error,
    reliability_curve,
)

Judged = tuple[Tensor, Tensor]


def reference_ece(confidence: np.ndarray, right: np.ndarray, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        upper = confidence <= 1 if b == bins - 1 else confidence < (b + 1) / bins
        inside = (confidence >= b / bins) & upper
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return total


@given(judged(), st.sampled_from([1, 2, 10, 15]))
def test_expected_calibration_error(case: Judged, bins: int) -> None:
    expected = reference_ece(case[0].numpy(), case[1].numpy(), bins)
    assert calibration_error(*case, bins=bins) == pytest.approx(expected, abs=1e-6)


@given(judged())
def test_torchmetrics_agrees_but_for_a_confidence_of_1(case: Judged) -> None:
    confidence, right = case
    below = confidence.clamp_max(1 - 1e-9)
    expected = binary_calibration_error(below, right.long(), n_bins=15).item()
    assert calibration_error(confidence, right) == pytest.approx(expected, abs=1e-6)


def test_a_confidence_of_1_has_no_bin_of_its_own() -> None:
    confidence, right = torch.tensor([1.0, 1.0, 0.95, 0.95]), torch.tensor([1, 0, 1, 1])
    assert calibration_error(confidence, right) == pytest.approx(0.225, abs=1e-6)
    assert binary_calibration_error(confidence, right, n_bins=15).item() == pytest.approx(0.275)


@given(judged())
def test_curve_agrees_with_scikit_learn(case: Judged) -> None:
    confidence, right = case
    # scikit-learn's bins are closed on the right; ours are on the left.
    assume(not any(c in TIES[1:-1] for c in confidence.tolist()))
    curve = reliability_curve(confidence, right, bins=15)
    accuracy, said = calibration_curve(right, confidence, n_bins=15)
    assert curve.accuracy.tolist() == pytest.approx(accuracy.tolist(), abs=1e-6)
    assert curve.confidence.tolist() == pytest.approx(said.tolist(), abs=1e-6)
    assert curve.count.sum() == len(right)


@given(predicted())
def test_classwise(case: Judged) -> None:
    probs, target = case
    each = [
        reference_ece(probs[:, c].numpy(), (target == c).numpy(), 15) for c in range(probs.shape[1])
    ]
    found = classwise_calibration_error(probs, target)
    assert found == pytest.approx(np.mean(each), abs=1e-6)


def reference_adaptive(confidence: np.ndarray, right: np.ndarray, parts: int) -> float:
    """Every example as many times as there are parts, so that they can be split evenly."""
    means = {c: right[confidence == c].mean() for c in confidence}
    order = np.sort(confidence).repeat(parts).reshape(parts, -1)
    gaps = [abs(np.mean([c - means[c] for c in part])) for part in order]
    return float(np.mean(gaps))


@given(judged(), st.sampled_from([1, 3, 15]))
def test_adaptive(case: Judged, parts: int) -> None:
    expected = reference_adaptive(case[0].numpy(), case[1].double().numpy(), parts)
    assert adaptive_calibration_error(*case, parts=parts) == pytest.approx(expected, abs=1e-6)


@given(judged(), st.randoms(use_true_random=False))
def test_order_does_not_matter(case: Judged, random: object) -> None:
    rows = list(range(len(case[0])))
    random.shuffle(rows)
    for measure in (calibration_error, adaptive_calibration_error):
        assert measure(*case) == pytest.approx(measure(case[0][rows], case[1][rows]), abs=1e-12)


def test_perfect_and_worst() -> None:
    half, right = torch.full((10,), 0.5), torch.arange(10) % 2 == 0
    for measure in (calibration_error, adaptive_calibration_error):
        assert measure(half, right) == pytest.approx(0, abs=1e-12)
        assert measure(torch.ones(5), torch.zeros(5)) == 1


def test_wrong_input_is_named() -> None:
    for measure in (calibration_error, adaptive_calibration_error, reliability_curve):
        with pytest.raises(DataError, match="confidence holds NaN"):
            measure(torch.tensor([torch.nan, 0.5]), torch.tensor([1, 0]))
        with pytest.raises(DataError, match="softmax first"):
            measure(torch.tensor([3.0, 0.5]), torch.tensor([1, 0]))
        with pytest.raises(DataError, match="True or False"):
            measure(torch.tensor([0.3, 0.5]), torch.tensor([1, 2]))
        with pytest.raises(DataError, match="shapes must agree"):
            measure(torch.tensor([0.3, 0.5]), torch.tensor([1]))
        with pytest.raises(DataError, match="empty"):
            measure(torch.zeros(0), torch.zeros(0))
    with pytest.raises(SettingError, match="bins=0"):
        calibration_error(torch.ones(1), torch.ones(1), bins=0)
    with pytest.raises(SettingError, match="parts=0"):
        adaptive_calibration_error(torch.ones(1), torch.ones(1), parts=0)
