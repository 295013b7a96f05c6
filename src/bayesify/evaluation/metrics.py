"""Measures of calibration and of telling data apart, each a pure function of tensors."""

import torch
from torch import Tensor

from bayesify.errors import DataError

BINS = 15


def brier(probs: Tensor, target: Tensor) -> Tensor:
    """Squared distance of probabilities `[B, C, ...]` from the truth, `[B, ...]`.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor([0.5000])
    """
    truth = torch.nn.functional.one_hot(target, probs.shape[1]).movedim(-1, 1)
    return (probs - truth).square().sum(1)


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal bins.

    Example:
        >>> round(calibration_error(torch.tensor([0.8, 0.8]), torch.tensor([True, False])), 6)
        0.3
    """
    from torchmetrics.functional.classification import binary_calibration_error

    # A mean of probabilities may round to a hair above 1, and torchmetrics then takes all of them
    # for logits: one such example turned an error of 0.008 into 0.26.
    inside = confidence.clamp(0, 1)
    return float(binary_calibration_error(inside, correct.long(), n_bins=bins, norm="l1"))


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Area under the ROC curve of a score that should be higher outside than inside."""
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(*_ranked(inside, outside)))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Average precision of a score that should be higher outside, outside being what is sought."""
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(*_ranked(inside, outside)))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of inside that is flagged at the threshold which flags 95 % of outside."""
    score, is_outside = _ranked(inside, outside)
    threshold = score[is_outside == 1].sort(descending=True).values
    cut = threshold[max(0, -(-95 * len(threshold) // 100) - 1)]
    return (score[is_outside == 0] >= cut).double().mean().item()


def _ranked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as their ranks in [0, 1], which keeps their order and ties, and who is outside."""
    if not (len(inside) and len(outside)):
        raise DataError(
            f"telling data apart needs examples of both kinds, and there are {len(inside)} inside "
            f"and {len(outside)} outside."
        )
    scores = torch.cat([inside, outside]).double().cpu()
    if torch.isnan(scores).any():
        raise DataError("scores hold NaN: they cannot be ranked.")
    values, ranks = scores.unique(return_inverse=True)
    flags = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    # torchmetrics takes numbers outside [0, 1] for logits and rounds them through a sigmoid.
    return ranks.double() / max(1, len(values) - 1), flags
