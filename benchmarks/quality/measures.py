"""From probabilities to numbers, by the same functions for our methods and for peers."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bayesify.evaluation.metrics import brier, calibration_error, correct, detect, nll


def entropy(probs: Tensor) -> Tensor:
    """Of predictions `[B, C]`, in nats and double precision."""
    p = probs.double()
    return -torch.xlogy(p, p).sum(1)


def quality(probs: Tensor, target: Tensor) -> dict[str, float]:
    """How good predictions are, by the truth."""
    right = correct(probs, target)
    return {
        "nll": nll(probs, target).double().mean().item(),
        "ece": calibration_error(probs.amax(1), right),
        "accuracy": right.double().mean().item(),
        "brier": brier(probs, target).double().mean().item(),
    }


def detection(inside: Tensor, others: dict[str, Tensor]) -> dict[str, Any]:
    """How well predictive entropy tells other sets from the test set, by their predictions."""
    known = entropy(inside)
    return {name: asdict(detect(known, entropy(probs))) for name, probs in others.items()}
