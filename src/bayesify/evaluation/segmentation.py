"""Measures of dense predictions, pixel by pixel at the target's resolution."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bayesify.errors import DataError
from bayesify.evaluation.checks import alike, require_numbers

IGNORED = -100


def mean_iou(label: Tensor, target: Tensor, classes: int, ignore_index: int = IGNORED) -> float:
    """Mean over classes of intersection over union; a class that occurs nowhere does not count.

    Args:
        label: Predicted classes, `[B, ...]`.
        target: True ones.
        classes: How many there are.
        ignore_index: Target value that does not count (void pixels).

    Example:
        >>> mean_iou(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]]), classes=3)
        0.5
    """
    return mean_of_iou(confusion(label, target, classes, ignore_index)).item()


def confusion(label: Tensor, target: Tensor, classes: int, ignore_index: int = IGNORED) -> Tensor:
    """How often each true class (rows) was taken for each class (columns), `[C, C]`.

    Raises:
        DataError: If shapes differ or a class is out of range.
    """
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    alike(label=label, target=target)
    counted = target[target != ignore_index]
    for name, values in (("label", label), ("target", counted)):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < classes:
            raise DataError(
                f"{name} runs from {int(values.min())} to {int(values.max())}, and there are "
                f"{classes} classes. Set ignore_index to the void label, if that is what it is."
            )
    matrix: Tensor = multiclass_confusion_matrix(
        label.cpu(), target.cpu(), classes, ignore_index=ignore_index, validate_args=False
    )
    return matrix


def iou(matrix: Tensor) -> Tensor:
    """Intersection over union of each class, `[C]`; NaN if it is nowhere, not even predicted."""
    hits = matrix.diagonal().double()
    return hits / (matrix.sum(0) + matrix.sum(1) - hits)


def mean_of_iou(matrix: Tensor) -> Tensor:
    """The mean of `iou` over classes that occur or are predicted.

    Raises:
        DataError: If no pixel was counted.
    """
    if not matrix.sum():
        raise DataError("no pixel was counted: all of the target is ignored, or there is none.")
    return iou(matrix).nanmean()


def at_resolution_of(target: Tensor, values: Tensor) -> Tensor:
    """Probabilities `[B, C, h, w]` or scores `[B, h, w]` at the resolution of a target `[B, H, W]`.

    Bilinear: between probabilities lie probabilities.
    """
    require_numbers("values", values)
    size, fits = target.shape[1:], len(values) == len(target)
    if fits and (values.shape[1:] == size or values.shape[2:] == size):
        return values
    if not fits or len(size) != 2 or values.ndim not in (3, 4):
        raise DataError(
            f"values {list(values.shape)} cannot be brought to the target's {list(target.shape)}: "
            f"they must be [batch, classes, height, width] or [batch, height, width]."
        )
    channels = values if values.ndim == 4 else values.unsqueeze(1)
    larger = interpolate(channels, tuple(size), mode="bilinear", align_corners=False)
    return larger if values.ndim == 4 else larger.squeeze(1)


def counted_pixels(
    probs: Tensor, target: Tensor, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Probabilities `[N, C]` and classes `[N]` of the pixels that count, at full resolution."""
    probs = at_resolution_of(target, probs)
    counted = (target != ignore_index).to(probs.device)
    return torch.movedim(probs, 1, -1)[counted], target.to(probs.device)[counted]
