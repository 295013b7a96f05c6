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

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from bayesify.errors import DataError, SettingError
from bayesify.evaluation import calibration, classification, diversity, regression, selective
from bayesify.evaluation.checks import alike, count, flags, numbers, probabilities, require_numbers
from bayesify.evaluation.detection import bounds, detect
from bayesify.evaluation.ranking import Groups, bits_of, group, grouped, place
from bayesify.evaluation.segmentation import (
    IGNORED,
    at_resolution_of,
    confusion,
    counted_pixels,
    iou,
    mean_of_iou,
)


class Measure(Metric):  # type: ignore[misc]
    """What all have in common."""

    full_state_update = False
    is_differentiable = False

    def keep_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Adds a state that is summed over batches and processes."""
        self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def keep_all(self, name: str) -> None:
        """Adds a state that grows with the number of examples."""
        self.add_state(name, [], dist_reduce_fx="cat")


class Average(Measure):
    """The mean of a number an example.

    Args:
        of: A function of a batch that gives these numbers, `[B, ...]`; a subclass has its own.

    Example:
        >>> mean = Average(lambda x: x)
        >>> mean.update(torch.tensor([1.0, 3.0]))
        >>> mean.compute()
        tensor(2., dtype=torch.float64)
    """

    of: Callable[..., Tensor]
    total: Tensor
    examples: Tensor

    def __init__(self, of: Callable[..., Tensor] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if of is not None:
            self.of = of
        elif not hasattr(self, "of"):
            raise SettingError("Average needs a function of a batch: Average(of=...).")
        self.keep_sum("total")
        self.keep_sum("examples")

    def update(self, *batch: Tensor) -> None:
        """Adds a batch, in the arguments of the function."""
        values = numbers(type(self).__name__, self.of(*batch))
        self.total += values.sum().to(self.total.device)
        self.examples += values.numel()

    def compute(self) -> Tensor:
        """The mean.

        Raises:
            DataError: If there was no batch.
        """
        _require_some(self.examples)
        return self.total / self.examples


class Accuracy(Average):
    """Share of right answers; `update(probs, target)`."""

    of = staticmethod(classification.correct)


class NLL(Average):
    """Mean -log of the target's probability; `update(probs, target)`."""

    of = staticmethod(classification.nll)


class Brier(Average):
    """Mean Brier score; `update(probs, target)`."""

    of = staticmethod(classification.brier)


class SoftLabelKL(Average):
    """Mean KL from people's label distributions; `update(probs, people)`."""

    of = staticmethod(classification.soft_label_kl)


class Disagreement(Average):
    """Mean share of pairs of draws with different answers; `update(draws)`."""

    of = staticmethod(diversity.disagreement)


class MutualKL(Average):
    """Mean KL divergence between two draws; `update(draws)`."""

    of = staticmethod(diversity.mutual_kl)


class RMSE(Average):
    """Root mean squared error; `update(mean, target)`."""

    of = staticmethod(regression.squared_error)

    def compute(self) -> Tensor:
        """The root of the mean."""
        return super().compute().sqrt()


class GaussianNLL(Average):
    """Mean -log N(target | mean, variance); `update(mean, variance, target)`."""

    of = staticmethod(regression.gaussian_nll)


class MixtureNLL(Average):
    """Mean -log of the draws' mean density; `update(means, variances, target)`."""

    of = staticmethod(regression.mixture_nll)


class IntervalCoverage(Average):
    """Share of targets in their intervals; `update(low, high, target)`."""

    of = staticmethod(regression.covered)


class IntervalWidth(Average):
    """Mean width of intervals; `update(low, high)`."""

    of = staticmethod(regression.width)


class GaussianCRPS(Average):
    """Mean CRPS of N(mean, std^2); `update(mean, std, target)`."""

    of = staticmethod(regression.crps_gaussian)


class DrawsCRPS(Average):
    """Mean CRPS of draws; `update(draws, target)`."""

    of = staticmethod(regression.crps_of_draws)


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
        _require_some(self.sums[0].sum())
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
        _require_some(examples)
        parts = classification.decompose(self.sums, (self.squares / examples).item())
        error = calibration.gap(self.sums).mean()
        return {"error": error, **_tensors({"brier": parts.brier, **asdict(parts)})}


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
        _require_some(torch.tensor(len(self.scores)))
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
            return _tensors(asdict(detect(score[~outside], score[outside])))
        return _between(*(_tensors(asdict(bound)) for bound in bounds(self.groups())))


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
        return {"error": error, **_tensors({"error_error": slack})}


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


def _require_some(examples: Tensor) -> None:
    if not examples:
        raise DataError("there is nothing to measure: no batch was added. Call update() first.")


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _between(least: Mapping[str, Tensor], most: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The middle of what a measure can be, and how far it is to the ends."""
    middles = {name: (least[name] + most[name]) / 2 for name in least}
    return middles | {f"{name}_error": (most[name] - least[name]) / 2 for name in least}
