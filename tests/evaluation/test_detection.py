"""Telling data apart, against scikit-learn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import judged
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from bayesify import DataError, Prediction, SettingError
from bayesify.evaluation.detection import (
    Detection,
    aupr_inside,
    detect,
    detect_by_scores,
    detect_mistakes,
    energy,
    scores,
)

values = st.lists(
    st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30
).map(torch.tensor)


def expected(inside: Tensor, outside: Tensor) -> Detection:
    flags = [0] * len(inside) + [1] * len(outside)
    both = torch.cat([inside, outside]).numpy()
    false, true, _ = roc_curve(flags, both, drop_intermediate=False)
    return Detection(
        roc_auc_score(flags, both),
        average_precision_score(flags, both),
        min(false[true >= 0.95]),
        average_precision_score([1 - flag for flag in flags], -both),
    )


def close(found: Detection, wanted: Detection) -> bool:
    return vars(found) == pytest.approx(vars(wanted), abs=1e-6)


@given(inside=values, outside=values)
def test_agrees_with_scikit_learn(inside: Tensor, outside: Tensor) -> None:
    assert close(detect(inside, outside), expected(inside, outside))


@given(judged())
def test_mistakes(case: tuple[Tensor, Tensor]) -> None:
    confidence, right = case
    if right.all() or not right.any():
        with pytest.raises(DataError, match=f"all {len(right)} answers are (right|wrong)"):
            detect_mistakes(-confidence, right)
        return
    wanted = expected(-confidence[right], -confidence[~right])
    assert close(detect_mistakes(-confidence, right), wanted)


def test_constant_scores_tell_nothing() -> None:
    found = detect(torch.ones(6), torch.ones(4))
    assert close(found, Detection(0.5, 0.4, 1.0, 0.6))


def test_many_examples_keep_their_precision() -> None:
    inside, outside = torch.randn(200_000), torch.randn(100_000) + 1
    assert close(detect(inside, outside), expected(inside, outside))


def test_infinite_scores_have_their_place() -> None:
    found = detect(torch.tensor([-torch.inf, 0.0]), torch.tensor([1.0, torch.inf]))
    assert close(found, Detection(1, 1, 0, 1))


def test_one_kind_only_or_nan() -> None:
    for measure in (detect, aupr_inside):
        with pytest.raises(DataError, match="0 inside and 3 outside"):
            measure(torch.ones(0), torch.ones(3))
        with pytest.raises(DataError, match="score holds NaN, 1 of 4"):
            measure(torch.ones(3), torch.tensor([torch.nan]))


def prediction(size: int, classes: int = 3) -> Prediction:
    draws = torch.softmax(2 * torch.randn(5, size, classes), -1)
    entropy = torch.special.entr(draws).sum(-1)
    return Prediction("classes", {"probs": draws.mean(0), "aleatoric": entropy.mean(0)})


def test_every_score_of_a_prediction() -> None:
    inside, outside = prediction(20), prediction(30)
    found = detect_by_scores(inside, outside)
    assert set(found) == {"uncertainty", "aleatoric", "epistemic", "confidence"}
    for name, value in found.items():
        known, strange = scores(inside)[name], scores(outside)[name]
        assert close(value, expected(known.double(), strange.double()))
    by_confidence = expected(-inside.confidence, -outside.confidence)
    assert close(found["confidence"], by_confidence)


def test_regression_has_no_confidence() -> None:
    averages = {name: torch.ones(4) for name in ("mean", "square", "aleatoric")}
    assert set(scores(Prediction("values", averages))) == {"uncertainty", "aleatoric", "epistemic"}


def test_energy() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64)
    wanted = -2 * torch.log(torch.exp(logits / 2).sum(1))
    assert torch.allclose(energy(logits, temperature=2), wanted)
    assert torch.isfinite(energy(torch.full((1, 4), 1e4)))
    assert energy(torch.randn(3, 7, 4, 5), dim=2).shape == (3, 7, 5)
    assert energy(10 * logits).mean() < energy(logits).mean()
    with pytest.raises(SettingError, match="temperature=0"):
        energy(logits, temperature=0)
    with pytest.raises(DataError, match="logits holds NaN"):
        energy(logits * torch.nan)
