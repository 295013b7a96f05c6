"""Dense measures against scikit-learn on all pixels at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_jaccard_index

from bayesify import DataError
from bayesify.evaluation.calibration import calibration_error
from bayesify.evaluation.detection import detect
from bayesify.evaluation.segmentation import at_resolution_of, confusion, iou, mean_iou
from bayesify.evaluation.streaming import Detector, Segmentation

VOID = 255


@st.composite
def maps(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Predicted and true classes `[B, H, W]`, some void, some classes absent, and how many."""
    classes = draw(st.integers(2, 6))
    occurring = draw(st.integers(1, classes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    label, target = torch.randint(0, occurring, (2, 3, 4, 5), generator=generator)
    void = torch.rand(target.shape, generator=generator) < draw(st.sampled_from([0, 0.3]))
    return label, target.masked_fill(void, VOID), classes


@given(maps())
def test_mean_iou(case: tuple[Tensor, Tensor, int]) -> None:
    label, target, classes = case
    counted = target != VOID
    # scikit-learn averages over the classes that occur in either.
    expected = jaccard_score(target[counted], label[counted], average="macro")
    assert mean_iou(*case, ignore_index=VOID) == pytest.approx(expected, abs=1e-6)
    same = multiclass_jaccard_index(label, target, classes, ignore_index=VOID)
    assert mean_iou(*case, ignore_index=VOID) == pytest.approx(same.item(), abs=1e-6)
    each = iou(confusion(*case, ignore_index=VOID))
    present = torch.cat([label[counted], target[counted]]).unique()
    assert (~each.isnan()).nonzero().flatten().tolist() == present.tolist()


def test_streaming_equals_all_pixels_at_once() -> None:
    probs = torch.softmax(2 * torch.randn(6, 4, 8, 9), 1)
    target = torch.randint(0, 4, (6, 8, 9))
    target[torch.rand(target.shape) < 0.2] = VOID
    target[2] = VOID  # a whole image that does not count
    measure = Segmentation(4, ignore_index=VOID)
    for part, wanted in zip(probs.split(1), target.split(1), strict=True):
        measure.update(part, wanted)
    found = measure.compute()
    counted = target != VOID
    confidence, label = probs.max(1)
    right = (label == target)[counted]
    expected = mean_iou(label, target, 4, ignore_index=VOID)
    assert found["miou"].item() == pytest.approx(expected, abs=1e-6)
    assert found["accuracy"].item() == pytest.approx(right.double().mean().item(), abs=1e-6)
    expected = calibration_error(confidence[counted], right)
    assert found["ece"].item() == pytest.approx(expected, abs=1e-6)
    assert found["iou"].nanmean().item() == pytest.approx(found["miou"].item())
    assert all(
        isinstance(state, Tensor) and state.numel() <= 45 for state in measure.metric_state.values()
    )


def test_coarse_predictions_are_judged_at_the_targets_resolution() -> None:
    probs, target = torch.softmax(torch.randn(2, 3, 4, 4), 1), torch.randint(0, 3, (2, 8, 12))
    larger = at_resolution_of(target, probs)
    assert larger.shape == (2, 3, 8, 12)
    assert torch.allclose(larger.sum(1), torch.ones(2, 8, 12))
    measure = Segmentation(3)
    measure.update(probs, target)
    expected = mean_iou(larger.argmax(1), target, 3)
    assert measure.compute()["miou"].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bins", [None, 1 << 20])
def test_strange_pixels_at_full_resolution(bins: int | None) -> None:
    score = torch.rand(5, 6, 6)
    strange = (torch.rand(5, 12, 12) < 0.2).long()
    strange[:, :2] = VOID
    detector = Detector(bins, ignore_index=VOID)
    for part, flag in zip(score.split(2), strange.split(2), strict=True):
        detector.update(part, flag)
    found = detector.compute()
    larger = at_resolution_of(strange, score)
    expected = detect(larger[strange == 0], larger[strange == 1])
    for name, value in vars(expected).items():
        slack = found.get(f"{name}_error", torch.zeros(())).item()
        assert found[name].item() == pytest.approx(value, abs=1e-6 + slack)
        assert slack < 0.01


def test_wrong_input_is_named() -> None:
    label, target = torch.zeros(1, 2, 2).long(), torch.full((1, 2, 2), VOID)
    with pytest.raises(DataError, match="target runs from 255 to 255, and there are 3 classes"):
        mean_iou(label, target, 3)
    with pytest.raises(DataError, match="no pixel was counted"):
        mean_iou(label, target, 3, ignore_index=VOID)
    with pytest.raises(DataError, match="label runs from 3 to 3"):
        mean_iou(label + 3, label, 3)
    with pytest.raises(DataError, match="shapes must agree"):
        mean_iou(label, label[:, :1], 3)
    measure = Segmentation(3, ignore_index=VOID)
    with pytest.raises(DataError, match="values holds NaN"):
        measure.update(torch.full((1, 3, 2, 2), torch.nan), label)
    with pytest.raises(DataError, match="cannot be brought to the target's"):
        measure.update(torch.rand(2, 3, 2, 2), torch.zeros(1, 4, 4).long())
