"""Measures that take data batch by batch: torchmetrics classes around the pure functions.

An average keeps a sum and a count, calibration a few sums a bin: no prediction is held. Measures
that rank examples keep one number and one flag an example, and are exact; with `bins=` they keep
two counts a bin, however many examples there are, and add to each result its `..._error`, the most
by which it can be off, which is computed from the counts and not estimated.

All sums are in double precision. Each class is a `torchmetrics.Metric`: `update`, `compute`,
`reset`, `forward`, `MetricCollection` and distributed training work as with any other.

Example:
    >>> score = Brier()
    >>> score.update(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    >>> score.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    >>> score.compute()
    tensor(0.2500, dtype=torch.float64)
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bayesify.evaluation import calibration, classification
from bayesify.evaluation.averages import (
    NLL,
    RMSE,
    Accuracy,
    Average,
    Brier,
    Disagreement,
    DrawsCRPS,
    GaussianCRPS,
    GaussianNLL,
    IntervalCoverage,
    IntervalWidth,
    Measure,
    MixtureNLL,
    MutualKL,
    SoftLabelKL,
    require_some,
    tensors,
)
from bayesify.evaluation.checks import alike, count
from bayesify.evaluation.ranked import AdaptiveCalibrationError, Detector, Ranked, Selective
from bayesify.evaluation.segmentation import (
    IGNORED,
    confusion,
    counted_pixels,
    iou,
    mean_of_iou,
)

__all__ = [
    "NLL",
    "RMSE",
    "Accuracy",
    "AdaptiveCalibrationError",
    "Average",
    "Brier",
    "CalibrationError",
    "ClasswiseCalibration",
    "Detector",
    "Disagreement",
    "DrawsCRPS",
    "GaussianCRPS",
    "GaussianNLL",
    "IntervalCoverage",
    "IntervalWidth",
    "Measure",
    "MixtureNLL",
    "MutualKL",
    "Ranked",
    "Segmentation",
    "Selective",
    "SoftLabelKL",
]


class CalibrationError(Measure):
    """Expected calibration error over equal bins; `update(confidence, correct)`, of any shape."""

    sums: Tensor

    def __init__(self, bins: int = calibration.BINS, **settings: Any) -> None:
        super().__init__(**settings)
        self.bins = count("bins", bins)
        self.keep_sum("sums", 3, bins)

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        """Adds a batch."""
        self.sums += calibration.bin_sums(confidence, correct, self.bins).to(self.sums.device)

    def compute(self) -> Tensor:
        """The error."""
        require_some(self.sums[0].sum())
        return calibration.gap(self.sums)

    def curve(self) -> calibration.ReliabilityCurve:
        """Accuracy against confidence so far, in this process."""
        return calibration.curve_of(self.sums)


class ClasswiseCalibration(Measure):
    """Classwise calibration error and the Brier score's parts; `update(probs, target)`.

    Args:
        classes: How many there are.
        bins: Bins of equal width, for each class.
    """

    sums: Tensor
    squares: Tensor

    def __init__(self, classes: int, bins: int = calibration.BINS, **settings: Any) -> None:
        super().__init__(**settings)
        self.bins = count("bins", bins)
        self.keep_sum("sums", 3, count("classes", classes, 2), bins)
        self.keep_sum("squares")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Adds a batch `[B, C, ...]`."""
        sums = calibration.classwise_sums(probs, target, self.bins)
        alike(classes=sums[0], expected=self.sums[0])
        self.sums += sums.to(self.sums.device)
        squares = classification.brier(probs, target)
        self.squares += squares.double().sum().to(self.squares.device)

    def compute(self) -> dict[str, Tensor]:
        """`error`, `brier`, `reliability`, `resolution`, `uncertainty` and `within`."""
        examples = self.sums[0, 0].sum()
        require_some(examples)
        parts = classification.decompose(self.sums, (self.squares / examples).item())
        error = calibration.gap(self.sums).mean()
        return {"error": error, **tensors({"brier": parts.brier, **asdict(parts)})}


class Segmentation(Measure):
    """Mean IoU, accuracy and calibration error over pixels; `update(probs, target)`.

    Args:
        classes: How many there are.
        ignore_index: Target value that does not count.
        bins: Of the calibration error.
    """

    matrix: Tensor
    sums: Tensor

    def __init__(
        self,
        classes: int,
        ignore_index: int = IGNORED,
        bins: int = calibration.BINS,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.classes = count("classes", classes, 2)
        self.ignore_index = ignore_index
        self.bins = count("bins", bins)
        self.keep_sum("matrix", classes, classes, dtype=torch.long)
        self.keep_sum("sums", 3, bins)

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Adds a batch: probabilities `[B, C, h, w]`, classes `[B, H, W]`."""
        probs, target = counted_pixels(probs, target, self.ignore_index)
        if not len(target):
            return
        confidence, label = probs.max(1)
        self.matrix += confusion(label, target, self.classes, self.ignore_index).to(self.device)
        sums = calibration.bin_sums(confidence, label == target, self.bins)
        self.sums += sums.to(self.device)

    def compute(self) -> dict[str, Tensor]:
        """`miou`, `iou` of each class, `accuracy` and `ece`."""
        miou = mean_of_iou(self.matrix)
        accuracy = self.matrix.diagonal().sum() / self.matrix.sum().double()
        ece = calibration.gap(self.sums)
        return {"miou": miou, "iou": iou(self.matrix), "accuracy": accuracy, "ece": ece}
