"""What `evaluate` measures, added up batch by batch: no prediction is kept.

Where an example has one answer, measures that rank keep a number and a flag of each, and are exact.
Pixels are too many for that: there they keep counts by bin, and say by how much that can be off.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from bayesify.errors import DataError
from bayesify.evaluation.detection import Detection
from bayesify.evaluation.segmentation import confusion, mean_of_iou
from bayesify.evaluation.streaming import (
    AdaptiveCalibrationError,
    Average,
    CalibrationError,
    Detector,
    Selective,
)
from bayesify.prediction import Prediction

BINS = 1 << 20  # 16 MB a measure, and scores a two-thousandth apart are told apart


class Tally:
    """Sums and counts of all that was answered.

    Args:
        prediction: The first, which shows what kind of answers there are.
        others: Names of the sets that are to be told apart from the test set.
    """

    def __init__(self, prediction: Prediction, others: Iterable[str]) -> None:
        self.kind = prediction.kind
        dense = prediction.uncertainty.ndim > (1 if self.kind == "classes" else 2)
        self.bins = BINS if dense else None
        self.classes = prediction.probs.shape[1] if dense and self.kind == "classes" else None
        names = ("nll", "square") if self.kind == "values" else ("nll", "correct", "brier")
        self.means = {name: Average(_itself) for name in names}
        self.calibration = CalibrationError()
        self.adaptive = AdaptiveCalibrationError(bins=self.bins)
        self.selective = Selective(self.bins)
        self.mistakes = Detector(self.bins)
        self.detectors = {name: Detector(self.bins) for name in others}
        self.matrix = torch.zeros((), dtype=torch.long)
        self.error = 0.0

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Adds what `measure` found of a batch."""
        if not found["score"].numel():  # a batch of void pixels
            return
        for name, mean in self.means.items():
            mean.update(found[name])
        for detector in self.detectors.values():
            detector.update(found["score"], torch.zeros_like(found["score"], dtype=torch.bool))
        if self.kind == "values":
            return
        right = found["correct"]
        self.calibration.update(found["confidence"], right)
        self.adaptive.update(found["confidence"], right)
        self.selective.update(found["doubt"], right)
        self.mistakes.update(found["doubt"], ~right)
        if self.classes is not None:
            self.matrix = self.matrix + confusion(found["label"], found["target"], self.classes)

    def add_other(self, name: str, score: Tensor) -> None:
        """Adds a batch of another set."""
        self.detectors[name].update(score, torch.ones_like(score, dtype=torch.bool))

    def measures(self) -> dict[str, Any]:
        """The numbers of a `Report`, by name.

        Raises:
            DataError: If no example was counted.
        """
        if not self.means["nll"].update_called:
            raise DataError(
                "there is nothing to measure: every target is the void label. Check ignore_index."
            )
        means = {name: mean.compute().item() for name, mean in self.means.items()}
        if self.kind == "values":
            return {"nll": means["nll"], "rmse": means["square"] ** 0.5}
        telling = 0 < means["correct"] < 1
        return {
            "nll": means["nll"],
            "accuracy": means["correct"],
            "ece": self.calibration.compute().item(),
            "adaptive_ece": self._read(self.adaptive.compute(), "error"),
            "brier": means["brier"],
            "aurc": self._read(self.selective.compute(), "aurc"),
            "mistakes_auroc": self._read(self.mistakes.compute(), "auroc") if telling else None,
            "miou": None if self.classes is None else mean_of_iou(self.matrix).item(),
        }

    def detections(self) -> dict[str, Detection]:
        """How well each of the other sets is told apart."""
        found = {name: detector.compute() for name, detector in self.detectors.items()}
        names = [one.name for one in fields(Detection)]
        return {
            other: Detection(*(self._read(values, name) for name in names))
            for other, values in found.items()
        }

    def ranking_error(self) -> float | None:
        """The most by which what was read so far can be off; None if it is exact."""
        return None if self.bins is None else self.error

    def _read(self, values: Mapping[str, Tensor], name: str) -> float:
        if self.bins is not None:
            self.error = max(self.error, values[f"{name}_error"].item())
        return values[name].item()


def _itself(values: Tensor) -> Tensor:
    return values
