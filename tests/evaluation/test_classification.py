"""Accuracy, NLL, Brier score and its parts, and agreement with people."""

import numpy as np
import pytest
import torch
from hypothesis import given
from samples import predicted
from scipy.special import rel_entr
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torch import Tensor

from bayesify import DataError
from bayesify.evaluation.classification import brier, brier_parts, correct, nll, soft_label_kl

Predicted = tuple[Tensor, Tensor]


@given(predicted())
def test_averages_agree_with_scikit_learn(case: Predicted) -> None:
    probs, target = case
    classes = range(probs.shape[1])
    hits = correct(probs, target).double().mean().item()
    assert hits == pytest.approx(accuracy_score(target, probs.argmax(1)), abs=1e-6)
    truth = np.eye(len(classes))[target.numpy()]
    squares = [brier_score_loss(truth[:, c], probs[:, c].numpy(), pos_label=1) for c in classes]
    assert brier(probs, target).mean().item() == pytest.approx(sum(squares), abs=1e-6)
    inside = probs.clamp_min(1e-10)  # scikit-learn cuts at eps, and we at the smallest number
    expected = log_loss(target, inside / inside.sum(1, keepdim=True), labels=list(classes))
    assert nll(inside / inside.sum(1, keepdim=True), target).mean().item() == pytest.approx(
        expected, abs=1e-6
    )


def reference_parts(probs: Tensor, target: Tensor, bins: int) -> tuple[float, float, float]:
    """Murphy's sums, bin by bin and class by class."""
    reliability = resolution = uncertainty = 0.0
    for c in range(probs.shape[1]):
        said, true = probs[:, c].numpy(), (target == c).double().numpy()
        rate = true.mean()
        uncertainty += rate * (1 - rate)
        for b in range(bins):
            upper = said <= 1 if b == bins - 1 else said < (b + 1) / bins
            inside = (said >= b / bins) & upper
            if inside.any():
                share = inside.mean()
                reliability += share * (said[inside].mean() - true[inside].mean()) ** 2
                resolution += share * (true[inside].mean() - rate) ** 2
    return reliability, resolution, uncertainty


@given(predicted())
def test_brier_parts(case: Predicted) -> None:
    parts = brier_parts(*case)
    found = (parts.reliability, parts.resolution, parts.uncertainty)
    assert found == pytest.approx(reference_parts(*case, bins=15), abs=1e-6)
    assert parts.brier == pytest.approx(brier(*case).mean().item(), abs=1e-9)


@given(predicted())
def test_nothing_is_left_over_where_a_bin_holds_one_prediction(case: Predicted) -> None:
    probs, target = case
    said = torch.where(torch.arange(len(probs)) % 2 == 0, 0.15, 0.75).double()
    two = torch.stack([1 - said, said], 1)
    parts = brier_parts(two, target.clamp_max(1), bins=10)
    assert parts.within == pytest.approx(0, abs=1e-12)
    expected = 2 * brier_score_loss(target.clamp_max(1) == 1, said, pos_label=True)
    three = parts.reliability - parts.resolution + parts.uncertainty
    assert three == pytest.approx(expected, abs=1e-6)


@given(predicted(), predicted())
def test_kl_to_people(case: Predicted, other: Predicted) -> None:
    size, classes = min(len(case[0]), len(other[0])), min(case[0].shape[1], other[0].shape[1])
    probs, people = (torch.softmax(10 * v[:size, :classes], 1) for v in (case[0], other[0]))
    expected = rel_entr(people.numpy(), probs.numpy()).sum(1)
    assert soft_label_kl(probs, people).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    counts = (51 * people).round() + 1
    by_share = soft_label_kl(probs, counts / counts.sum(1, keepdim=True))
    assert torch.allclose(soft_label_kl(probs, counts), by_share, atol=1e-12)
    assert soft_label_kl(probs, probs).max() < 1e-12


def test_certainty_costs_a_finite_amount() -> None:
    certain = torch.tensor([[1.0, 0.0]])
    assert 80 < nll(certain, torch.tensor([1])).item() < 110
    assert torch.isfinite(soft_label_kl(certain, torch.tensor([[0.5, 0.5]]))).all()


def test_dense_predictions() -> None:
    probs, target = torch.rand(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    flat = (probs.movedim(1, -1).reshape(-1, 3), target.flatten())
    for measure in (correct, nll, brier):
        assert measure(probs, target).shape == (2, 4, 5)
        assert torch.equal(measure(probs, target).flatten(), measure(*flat))


def test_wrong_input_is_named() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    for measure in (correct, nll, brier, brier_parts):
        with pytest.raises(DataError, match="NaN or infinite numbers, 1 of 4"):
            measure(torch.tensor([[0.5, torch.nan], [0.1, 0.9]]), torch.tensor([0, 1]))
        with pytest.raises(DataError, match="not one-hot"):
            measure(probs, torch.eye(2).long())
        with pytest.raises(DataError, match="from 0 to 2, and there are 2 classes"):
            measure(probs, torch.tensor([0, 2]))
        with pytest.raises(DataError, match="empty"):
            measure(torch.rand(0, 2), torch.zeros(0).long())
    with pytest.raises(DataError, match="shares or counts"):
        soft_label_kl(probs, torch.zeros(2, 2))
    with pytest.raises(DataError, match="probs \\[2, 2\\], people \\[2, 3\\]"):
        soft_label_kl(probs, torch.ones(2, 3))
