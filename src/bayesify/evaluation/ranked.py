"""Measures that depend on the order of a score, batch by batch: exact, or in bounded memory."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from bayesify.evaluation import calibration, selective
from bayesify.evaluation.averages import Measure, require_some, tensors
from bayesify.evaluation.checks import alike, count, flags, probabilities, require_numbers
from bayesify.evaluation.detection import bounds, detect
from bayesify.evaluation.ranking import Groups, bits_of, group, grouped, place
from bayesify.evaluation.segmentation import IGNORED, at_resolution_of


class Ranked(Measure):
    """What depends on the order of a score.

    Args:
        bins: Bounds memory to two counts a bin; a power of two, such as 2**16. None keeps a number
            and a flag an example, and is exact.
    """

    scores: list[Tensor]
    marks: list[Tensor]
    plain: Tensor
    flagged: Tensor

    def __init__(self, bins: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.bins = bins
        if bins is None:
            self.keep_all("scores")
            self.keep_all("marks")
        else:
            bits_of(bins)
            self.keep_sum("plain", bins, dtype=torch.long)
            self.keep_sum("flagged", bins, dtype=torch.long)

    def add(self, score: Tensor, flag: Tensor) -> None:
        """Takes examples in."""
        alike(score=score, flag=flag)
        if not score.numel():
            return
        score, flag = score.detach().flatten(), flags("flag", flag.flatten())
        require_numbers("score", score, finite=False)
        if self.bins is None:
            self.scores.append(score.to(self.device))
            self.marks.append(flag.to(self.device))
            return
        bins = place(score, self.bins)
        self.plain += torch.bincount(bins[~flag], minlength=self.bins).to(self.device)
        self.flagged += torch.bincount(bins[flag], minlength=self.bins).to(self.device)

    def kept(self) -> tuple[Tensor, Tensor]:
        """All scores and flags, of the exact measure."""
        require_some(torch.tensor(len(self.scores)))
        return dim_zero_cat(self.scores), dim_zero_cat(self.marks)

    def groups(self) -> Groups:
        """Counts by rising score."""
        if self.bins is None:
            return group(*self.kept())
        return grouped(self.plain.cpu(), self.flagged.cpu())


class Detector(Ranked):
    """AUROC, AUPR of both kinds and FPR95 of a score that should be higher outside.

    For strange inputs, mistakes, or pixels at full resolution; see `detection.Detection`.

    Args:
        bins: See `Ranked`.
        ignore_index: Flag that does not count (void pixels).
    """

    def __init__(
        self, bins: int | None = None, ignore_index: int = IGNORED, **settings: Any
    ) -> None:
        super().__init__(bins, **settings)
        self.ignore_index = ignore_index

    def update(self, score: Tensor, outside: Tensor) -> None:
        """Adds a batch.

        Args:
            score: `[B, ...]`; of pixels it may be coarser than the flags.
            outside: 1 or True outside, 0 or False inside.
        """
        score = at_resolution_of(outside, score)
        alike(score=score, outside=outside)
        counted = (outside != self.ignore_index).to(score.device)
        self.add(score[counted], outside.to(score.device)[counted])

    def compute(self) -> dict[str, Tensor]:
        """`auroc`, `aupr`, `fpr95`, `aupr_inside` and, with bins, the error of each.

        Raises:
            DataError: If there are examples of one kind only.
        """
        if self.bins is None:
            score, outside = self.kept()
            return tensors(asdict(detect(score[~outside], score[outside])))
        return _between(*(tensors(asdict(bound)) for bound in bounds(self.groups())))


class Selective(Ranked):
    """AURC, accuracy at coverages and in buckets of rising uncertainty.

    Args:
        bins: See `Ranked`.
        coverages: Shares of examples that are answered.
        buckets: How many buckets of equal size.
    """

    def __init__(
        self,
        bins: int | None = None,
        coverages: tuple[float, ...] = selective.COVERAGES,
        buckets: int = selective.BUCKETS,
        **settings: Any,
    ) -> None:
        super().__init__(bins, **settings)
        self.coverages = tuple(coverages)
        self.buckets = count("buckets", buckets)

    def update(self, uncertainty: Tensor, correct: Tensor) -> None:
        """Adds a batch, of any shape."""
        self.add(uncertainty, ~flags("correct", correct).to(uncertainty.device))

    def compute(self) -> dict[str, Tensor]:
        """`aurc`, `accuracy_at_80` and so on, `buckets` and, with bins, the error of each."""
        groups = self.groups()
        if self.bins is None:
            return selective.summarise(groups, self.coverages, self.buckets)
        return _between(*selective.bounds(groups, self.coverages, self.buckets))


class AdaptiveCalibrationError(Ranked):
    """Calibration error over bins of equal mass; `update(confidence, correct)`, of any shape.

    Args:
        parts: Bins of equal mass.
        bins: See `Ranked`.
    """

    def __init__(
        self, parts: int = calibration.BINS, bins: int | None = None, **settings: Any
    ) -> None:
        super().__init__(bins, **settings)
        self.parts = count("parts", parts)

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        """Adds a batch."""
        # By doubt, which has small numbers where most confidences are: bins are finer there.
        self.add(1 - probabilities("confidence", confidence), flags("correct", correct))

    def compute(self) -> dict[str, Tensor]:
        """`error` and, with bins, `error_error`."""
        groups = self.groups()
        error = calibration.gap(calibration.equal_mass_sums(groups, self.parts))
        if self.bins is None:
            return {"error": error}
        slack = calibration.equal_mass_error(groups, self.parts)
        return {"error": error, **tensors({"error_error": slack})}


def _between(least: Mapping[str, Tensor], most: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The middle of what a measure can be, and how far it is to the ends."""
    middles = {name: (least[name] + most[name]) / 2 for name in least}
    return middles | {f"{name}_error": (most[name] - least[name]) / 2 for name in least}
