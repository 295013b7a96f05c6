import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score, roc_curve
from torch import Tensor

from bayesify import DataError
from bayesify.evaluation.metrics import aupr, auroc, brier, calibration_error, fpr95

scores = st.lists(
    st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30
).map(torch.tensor)


def both(inside: Tensor, outside: Tensor) -> tuple[list[float], list[int]]:
    flags = [0] * len(inside) + [1] * len(outside)
    return torch.cat([inside, outside]).tolist(), flags


@given(inside=scores, outside=scores)
def test_ranking_measures_agree_with_scikit_learn(inside: Tensor, outside: Tensor) -> None:
    values, flags = both(inside, outside)
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(flags, values), abs=1e-6)
    assert aupr(inside, outside) == pytest.approx(average_precision_score(flags, values), abs=1e-6)
    false, true, _ = roc_curve(flags, values, drop_intermediate=False)
    assert fpr95(inside, outside) == pytest.approx(min(false[true >= 0.95]), abs=1e-6)


def test_known_detection() -> None:
    low, high = torch.arange(10.0), torch.arange(100.0, 110.0)
    assert (auroc(low, high), aupr(low, high), fpr95(low, high)) == (1, 1, 0)
    assert auroc(high, low) == 0
    assert auroc(torch.ones(4), torch.ones(5)) == 0.5


def test_detection_needs_both_kinds() -> None:
    for measure in (auroc, aupr, fpr95):
        with pytest.raises(DataError, match="examples of both kinds"):
            measure(torch.ones(3), torch.ones(0))
        with pytest.raises(DataError, match="NaN"):
            measure(torch.ones(3), torch.tensor([torch.nan]))


def reference_ece(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Written again, bin by bin."""
    total = 0.0
    for low in range(bins):
        inside = [
            i for i, c in enumerate(confidence.tolist())
            if low / bins < c <= (low + 1) / bins or (low == 0 and c == 0)
        ]  # fmt: skip
        if inside:
            gap = confidence[inside].mean() - correct[inside].float().mean()
            total += len(inside) / len(confidence) * abs(gap.item())
    return total


@given(seed=st.integers(0, 1000), count=st.integers(1, 200))
def test_calibration_error(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(count, generator=generator)
    correct = torch.rand(count, generator=generator) < confidence
    expected = reference_ece(confidence, correct)
    assert calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-5)


def test_confidence_that_rounds_above_one_is_not_a_logit() -> None:
    confidence = torch.tensor([1.0000001, 0.9, 0.9])
    correct = torch.tensor([True, True, True])
    assert calibration_error(confidence, correct) == pytest.approx(0.2 / 3, abs=1e-6)


def test_brier_agrees_with_scikit_learn() -> None:
    probs, target = torch.rand(50), torch.randint(0, 2, (50,))
    two = torch.stack([1 - probs, probs], 1)
    expected = 2 * brier_score_loss(target, probs)
    assert brier(two, target).mean().item() == pytest.approx(expected, abs=1e-6)
    dense = brier(torch.rand(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4)))
    assert dense.shape == (2, 4, 4)
