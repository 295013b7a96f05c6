"""From probabilities to numbers, by the same functions for our methods and for peers."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bayesify.evaluation.calibration import bin_sums, gap
from bayesify.evaluation.metrics import brier, correct, detect, nll


def entropy(probs: Tensor) -> Tensor:
    """Of predictions `[B, C]`, in nats and double precision."""
    p = probs.double()
    return -torch.xlogy(p, p).sum(1)


def quality(probs: Tensor, target: Tensor) -> dict[str, Any]:
    """How good predictions are, by the truth; bins of confidence, to be pooled with others."""
    right = correct(probs, target)
    bins = bin_sums(probs.amax(1), right)
    return {
        "nll": nll(probs, target).double().mean().item(),
        "ece": gap(bins).item(),
        "accuracy": right.double().mean().item(),
        "brier": brier(probs, target).double().mean().item(),
        "bins": bins.tolist(),
    }


def pooled_ece(parts: Iterable[list[list[float]]]) -> float:
    """The calibration error of several sets of predictions together, by their bins."""
    return gap(torch.tensor(list(parts), dtype=torch.float64).sum(0)).item()


def perfect_ece(bins: list[list[float]]) -> float:
    """The calibration error to be expected of such predictions if they were perfectly calibrated.

    A bin of n examples that says p is off by the luck of n throws, sqrt(2 n p (1 - p) / pi) in the
    mean: a little less where it holds different p.
    """
    counts, said, _ = torch.tensor(bins, dtype=torch.float64)
    p = said / counts.clamp_min(1)
    return ((2 / math.pi * counts * p * (1 - p)).sqrt().sum() / counts.sum()).item()


def detection(inside: Tensor, others: dict[str, Tensor]) -> dict[str, Any]:
    """How well predictive entropy tells other sets from the test set, by their predictions."""
    known = entropy(inside)
    return {name: asdict(detect(known, entropy(probs))) for name, probs in others.items()}
