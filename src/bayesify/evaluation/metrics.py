"""The measures under one roof: pure functions of tensors. `streaming` has them batch by batch."""

from bayesify.evaluation.calibration import (
    BINS,
    adaptive_calibration_error,
    calibration_error,
    classwise_calibration_error,
    reliability_curve,
)
from bayesify.evaluation.classification import brier, brier_parts, correct, nll, soft_label_kl
from bayesify.evaluation.detection import (
    aupr,
    aupr_inside,
    auroc,
    detect,
    detect_by_scores,
    detect_mistakes,
    energy,
    fpr95,
)
from bayesify.evaluation.diversity import by_member, disagreement, mutual_kl
from bayesify.evaluation.regression import (
    covered,
    crps_gaussian,
    crps_of_draws,
    gaussian_nll,
    interval,
    interval_of_draws,
    mixture_nll,
    rmse,
    squared_error,
    width,
)
from bayesify.evaluation.segmentation import mean_iou
from bayesify.evaluation.selective import (
    accuracy_at_coverage,
    accuracy_by_uncertainty,
    aurc,
    choose_threshold,
    risk_coverage,
)

__all__ = [
    "BINS",
    "accuracy_at_coverage",
    "accuracy_by_uncertainty",
    "adaptive_calibration_error",
    "aupr",
    "aupr_inside",
    "aurc",
    "auroc",
    "brier",
    "brier_parts",
    "by_member",
    "calibration_error",
    "choose_threshold",
    "classwise_calibration_error",
    "correct",
    "covered",
    "crps_gaussian",
    "crps_of_draws",
    "detect",
    "detect_by_scores",
    "detect_mistakes",
    "disagreement",
    "energy",
    "fpr95",
    "gaussian_nll",
    "interval",
    "interval_of_draws",
    "mean_iou",
    "mixture_nll",
    "mutual_kl",
    "nll",
    "reliability_curve",
    "risk_coverage",
    "rmse",
    "soft_label_kl",
    "squared_error",
    "width",
]
