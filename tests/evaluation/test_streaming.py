"""Measures batch by batch: the same as all at once, in bounded memory, within the stated error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import judged, predicted
from torch import Tensor
from torchmetrics import MetricCollection

from bayesify import DataError, SettingError
from bayesify.evaluation import classification, diversity, regression, selective, streaming
from bayesify.evaluation.calibration import (
    adaptive_calibration_error,
    calibration_error,
    classwise_calibration_error,
    reliability_curve,
)
from bayesify.evaluation.detection import detect
from bayesify.evaluation.streaming import (
    AdaptiveCalibrationError,
    Average,
    CalibrationError,
    ClasswiseCalibration,
    Detector,
    Measure,
    Selective,
)

Judged = tuple[Tensor, Tensor]


def fed(measure: Measure, *columns: Tensor, size: int = 7, dim: int = 0) -> Measure:
    """The measure, after it has seen the columns in parts."""
    parts = [column.split(size, dim if column.ndim > 1 else 0) for column in columns]
    for part in zip(*parts, strict=True):
        measure.update(*part)
    return measure


AVERAGES = {
    streaming.Accuracy: (classification.correct, 2),
    streaming.NLL: (classification.nll, 2),
    streaming.Brier: (classification.brier, 2),
}


@given(predicted())
def test_averages_of_classes(case: Judged) -> None:
    for kind, (function, _) in AVERAGES.items():
        expected = function(*case).double().mean().item()
        assert fed(kind(), *case).compute().item() == pytest.approx(expected, abs=1e-6)
    found = fed(ClasswiseCalibration(case[0].shape[1]), *case).compute()
    parts = classification.brier_parts(*case)
    expected = {"error": classwise_calibration_error(*case), "brier": parts.brier, **vars(parts)}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        expected, abs=1e-6
    )


def test_other_averages() -> None:
    mean, target = torch.randn(2, 20)
    std = torch.rand(20) + 0.1
    low, high = regression.interval(mean, std, 0.8)
    draws = torch.softmax(torch.randn(4, 20, 3), -1)
    people = torch.randint(0, 10, (20, 3)) + 1
    cases = [
        (streaming.GaussianNLL, regression.gaussian_nll, (mean, std.square(), target), 0),
        (streaming.MixtureNLL, regression.mixture_nll, (draws[..., 0], draws[..., 1], target), 1),
        (streaming.IntervalCoverage, regression.covered, (low, high, target), 0),
        (streaming.IntervalWidth, regression.width, (low, high), 0),
        (streaming.GaussianCRPS, regression.crps_gaussian, (mean, std, target), 0),
        (streaming.DrawsCRPS, regression.crps_of_draws, (draws[..., 0], target), 1),
        (streaming.SoftLabelKL, classification.soft_label_kl, (draws[0], people), 0),
        (streaming.Disagreement, diversity.disagreement, (draws,), 1),
        (streaming.MutualKL, diversity.mutual_kl, (draws,), 1),
    ]
    for kind, function, arguments, dim in cases:
        expected = function(*arguments).double().mean().item()
        found = fed(kind(), *arguments, dim=dim).compute().item()
        assert found == pytest.approx(expected, abs=1e-6), kind
    found = fed(streaming.RMSE(), mean, target).compute().item()
    assert found == pytest.approx(regression.rmse(mean, target), abs=1e-6)


@given(judged())
def test_exact_measures_equal_the_functions(case: Judged) -> None:
    confidence, right = case
    found = fed(CalibrationError(), *case)
    assert found.compute().item() == pytest.approx(calibration_error(*case), abs=1e-9)
    assert torch.allclose(found.curve().accuracy, reliability_curve(*case).accuracy)
    error = fed(AdaptiveCalibrationError(), *case).compute()["error"].item()
    assert error == pytest.approx(adaptive_calibration_error(*case), abs=1e-9)
    numbers = fed(Selective(), 1 - confidence, right).compute()
    assert numbers["aurc"].item() == pytest.approx(selective.aurc(1 - confidence, right), abs=1e-9)
    for coverage in (80, 90, 95):
        expected = selective.accuracy_at_coverage(1 - confidence, right, coverage / 100)
        assert numbers[f"accuracy_at_{coverage}"].item() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(
        numbers["buckets"], selective.accuracy_by_uncertainty(1 - confidence, right)
    )
    if right.any() and not right.all():
        expected = vars(detect(confidence[~right], confidence[right]))
        values = fed(Detector(), confidence, right).compute()
        assert {n: v.item() for n, v in values.items()} == pytest.approx(expected, abs=1e-6)


def within(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name, value in exact.items():
        slack = found[f"{name}_error"] + 1e-6  # torchmetrics' own rounding is 1e-8
        assert ((found[name] - value).abs() <= slack).all(), name


@settings(max_examples=60)
@given(judged(least=2), st.sampled_from([1.0, 1e-3, 0.02]))
def test_the_stated_error_bounds_the_true_one(case: Judged, spread: float) -> None:
    confidence, right = case
    close = 1 - spread * (1 - confidence)  # many fall into the same few bins
    exact = fed(Selective(), 1 - close, right).compute()
    within(fed(Selective(bins=1 << 10), 1 - close, right).compute(), exact)
    exact = fed(AdaptiveCalibrationError(parts=4), close, right).compute()
    within(fed(AdaptiveCalibrationError(parts=4, bins=1 << 10), close, right).compute(), exact)
    if right.any() and not right.all():
        exact = fed(Detector(), close, right).compute()
        within(fed(Detector(bins=1 << 10), close, right).compute(), exact)


def test_the_error_is_reached_and_falls_with_more_bins() -> None:
    inside, outside = torch.tensor([1.01, 1.02]), torch.tensor([1.03, 1.04])
    score, flag = torch.cat([inside, outside]), torch.tensor([0, 0, 1, 1])
    found = fed(Detector(bins=1 << 10), score, flag).compute()
    assert found["auroc"] == found["auroc_error"] == 0.5  # all in one bin: nothing is known
    many = torch.rand(20_000), (torch.rand(20_000) < 0.5)
    score = many[0] + 0.3 * many[1] + 3
    errors = {}
    for bits in (10, 14, 18, 22):
        found = fed(Detector(bins=1 << bits), score, many[1], size=5000).compute()
        errors[bits] = found["auroc_error"].item()
    assert errors[10] > 4 * errors[14] > 16 * errors[18]
    assert errors[22] < 1e-4


def test_memory() -> None:
    score, flag = torch.rand(1000), torch.rand(1000) < 0.5
    exact, binned = fed(Detector(), score, flag), fed(Detector(bins=1 << 10), score, flag)
    kept = [value for state in exact.metric_state.values() for value in state]
    assert sum(value.numel() for value in kept) == 2000
    assert sum(value.nbytes for value in kept) == 5000  # a float32 and a byte
    assert sum(state.numel() for state in binned.metric_state.values()) == 2048
    for measure in (streaming.Brier(), CalibrationError(), ClasswiseCalibration(10)):
        assert sum(state.numel() for state in measure.metric_state.values()) <= 451


def test_they_are_torchmetrics() -> None:
    probs, target = torch.softmax(torch.randn(12, 3), 1), torch.randint(0, 3, (12,))
    both = MetricCollection([streaming.Brier(), streaming.NLL()])
    both.update(probs[:6], target[:6])
    both.update(probs[6:], target[6:])
    expected = classification.brier(probs, target).mean().item()
    assert both.compute()["Brier"].item() == pytest.approx(expected, abs=1e-6)
    both.reset()
    both.update(probs[:3], target[:3])
    expected = classification.brier(probs[:3], target[:3]).mean().item()
    assert both.compute()["Brier"].item() == pytest.approx(expected, abs=1e-6)
    detector = Detector()
    first = detector(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
    second = detector(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    assert (first["auroc"], second["auroc"], detector.compute()["auroc"]) == (1, 0, 0.5)


def test_two_processes_are_added_up() -> None:
    score, flag = torch.rand(40), torch.rand(40) < 0.5
    for kind in (Detector, lambda: Detector(bins=1 << 12), Selective, CalibrationError):
        whole, one, two = kind(), kind(), kind()
        whole.update(score, flag)
        one.update(score[:15], flag[:15])
        two.update(score[15:], flag[15:])
        one.merge_state(two)
        found, expected = one.compute(), whole.compute()
        for name in expected if isinstance(expected, dict) else ():
            assert torch.allclose(found[name], expected[name]), name
        if not isinstance(expected, dict):
            assert torch.allclose(found, expected)


def test_float32_batches_add_up_in_double_precision() -> None:
    measure = Average(lambda x: x)
    for _ in range(300):
        measure.update(torch.full((1000,), 0.1))
    assert measure.compute().item() == pytest.approx(torch.tensor(0.1).double().item(), abs=1e-12)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_nothing_measured() -> None:
    kinds = [streaming.Brier(), CalibrationError(), ClasswiseCalibration(3), Detector()]
    kinds += [Detector(bins=1 << 10), Selective(), Selective(bins=1 << 10), streaming.RMSE()]
    kinds += [AdaptiveCalibrationError(), streaming.Segmentation(3)]
    for measure in kinds:
        with pytest.raises(DataError, match="nothing to measure|no pixel was counted"):
            measure.compute()


def test_degenerate_input() -> None:
    nan = torch.tensor([0.5, torch.nan])
    for measure in (Detector(), Detector(bins=1 << 10), Selective(), CalibrationError()):
        with pytest.raises(DataError, match="holds NaN"):
            measure.update(nan, torch.tensor([0, 1]))
    with pytest.raises(DataError, match="Average holds NaN"):
        Average(lambda x: x).update(nan)
    for bins in (None, 1 << 10):
        one = fed(Detector(bins), torch.rand(5), torch.zeros(5))
        with pytest.raises(DataError, match="5 inside and 0 outside"):
            one.compute()
        constant = fed(Detector(bins), torch.ones(4), torch.tensor([0, 1, 1, 0])).compute()
        assert constant["auroc"] == 0.5
        wrong = fed(Selective(bins), torch.rand(20), torch.zeros(20)).compute()
        assert wrong["aurc"].item() == pytest.approx(1)
        assert wrong["buckets"].tolist() == pytest.approx([0] * 10, abs=1e-12)
    with pytest.raises(DataError, match="cannot be brought to the target's"):
        Detector().update(torch.ones(3), torch.ones(2))
    with pytest.raises(DataError, match="shapes must agree"):
        Detector().update(torch.ones(3, 2), torch.ones(3))
    with pytest.raises(DataError, match="shapes must agree"):
        ClasswiseCalibration(4).update(torch.ones(2, 3) / 3, torch.tensor([0, 1]))
    with pytest.raises(SettingError, match="power of two"):
        Detector(bins=1000)
    with pytest.raises(SettingError, match="needs a function"):
        Average()
