r"""Telling data apart by a score: strange inputs from known ones, mistakes from right answers.

A score should be higher outside than inside. Everything here depends on the order of the scores
alone, and treats ties as ties. Average precision is $\sum_t (R_t - R_{t-1}) P_t$ over thresholds,
without interpolation; which of the two kinds is sought makes a difference to it, and both are
given.

The energy of a network's logits, $-T \log \sum_c \exp(f_c / T)$, is lower where some class fits
(Liu et al., *Energy-based Out-of-distribution Detection*, NeurIPS 2020,
https://arxiv.org/abs/2010.03759).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.errors import DataError, SettingError
from bayesify.evaluation.checks import alike, flags, numbers, require_numbers
from bayesify.evaluation.ranking import Groups, run
from bayesify.prediction import Prediction


@dataclass(frozen=True)
class Detection:
    """How well a score tells other data from the test set's.

    Args:
        auroc: Area under the ROC curve: the chance that one outside scores higher than one inside.
        aupr: Average precision, outside being what is sought.
        fpr95: Share of inside that is flagged where 95 % of outside is.
        aupr_inside: Average precision of the score turned round, inside being what is sought.
    """

    auroc: float
    aupr: float
    fpr95: float
    aupr_inside: float


def detect(inside: Tensor, outside: Tensor) -> Detection:
    """All measures of a score that should be higher outside than inside.

    Example:
        >>> detect(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4]))
        Detection(auroc=1.0, aupr=1.0, fpr95=0.0, aupr_inside=1.0)

    Raises:
        DataError: If one of the two is empty, or a score is NaN.
    """
    return Detection(
        auroc(inside, outside),
        aupr(inside, outside),
        fpr95(inside, outside),
        aupr_inside(inside, outside),
    )


def detect_mistakes(score: Tensor, correct: Tensor) -> Detection:
    """How well a score tells mistakes from right answers, mistakes being what is sought.

    Raises:
        DataError: If all answers are right, or all are wrong.
    """
    alike(score=score, correct=correct)
    right = flags("correct", correct).to(score.device)
    if right.all() or not right.any():
        raise DataError(
            f"all {right.numel()} answers are {'right' if right.any() else 'wrong'}: how well a "
            f"score finds mistakes cannot be measured. Use more, or other, data."
        )
    return detect(score[right], score[~right])


def detect_by_scores(inside: Prediction, outside: Prediction) -> dict[str, Detection]:
    """How well each of a prediction's scores tells two sets of inputs apart."""
    known, strange = scores(inside), scores(outside)
    return {name: detect(known[name], strange[name]) for name in known}


def scores(prediction: Prediction) -> dict[str, Tensor]:
    """Scores that are higher for stranger inputs, each `[B, ...]`, by what they are.

    Total, aleatoric and epistemic uncertainty and, where there is one, the lack of confidence.
    Energy needs logits, which a prediction has not: see `energy`.
    """
    names = ("uncertainty", "aleatoric", "epistemic")
    found: dict[str, Tensor] = {name: getattr(prediction, name) for name in names}
    if prediction.kind != "values":
        # In double precision, or confidences that differ may come to the same.
        found["confidence"] = 1 - prediction.confidence.double()
    return found


def energy(logits: Tensor, *, temperature: float = 1.0, dim: int = 1) -> Tensor:
    """-T log sum exp(logits / T) over the classes: higher for stranger inputs.

    Args:
        logits: `[B, C, ...]`; of several draws `[S, B, C, ...]` with `dim=2`, the mean over which
            is the energy of a Bayesian network.
        temperature: T.
        dim: Where the classes are.

    Example:
        >>> energy(torch.zeros(1, 2))
        tensor([-0.6931])
    """
    if not temperature > 0:
        raise SettingError(f"temperature={temperature!r} must be above 0.")
    require_numbers("logits", logits)
    return -temperature * torch.logsumexp(logits / temperature, dim)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Area under the ROC curve of a score that should be higher outside than inside."""
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(*_ranked(inside, outside)))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Average precision of a score that should be higher outside, outside being what is sought."""
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(*_ranked(inside, outside)))


def aupr_inside(inside: Tensor, outside: Tensor) -> float:
    """Average precision of a score that should be lower inside, inside being what is sought."""
    _require_both(inside.numel(), outside.numel())
    return aupr(-outside, -inside)


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of inside that is flagged at the threshold which flags 95 % of outside.

    The share of outside that passes where 95 % of inside does is `fpr95(-outside, -inside)`.
    """
    score, is_outside = _ranked(inside, outside)
    threshold = score[is_outside == 1].sort(descending=True).values
    cut = threshold[max(0, -(-95 * len(threshold) // 100) - 1)]
    return (score[is_outside == 0] >= cut).double().mean().item()


def _ranked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as their ranks in [0, 1], which keeps their order and ties, and who is outside."""
    _require_both(inside.numel(), outside.numel())
    scores = numbers("score", torch.cat([inside.flatten(), outside.flatten()]), finite=False)
    values, ranks = scores.unique(return_inverse=True)
    flag = torch.arange(len(scores)) >= inside.numel()
    # torchmetrics takes numbers outside [0, 1] for logits and rounds them through a sigmoid.
    return ranks.double() / max(1, len(values) - 1), flag.long()


def _require_both(inside: int, outside: int) -> None:
    if not (inside and outside):
        raise DataError(
            f"telling data apart needs examples of both kinds, and there are {inside} inside "
            f"and {outside} outside."
        )


# Where scores are known by bin only, a measure is known to lie between two numbers.


def bounds(groups: Groups) -> tuple[Detection, Detection]:
    """The least and the most that each measure can be, for groups whose flag is to be outside.

    Within a bin outside may score higher throughout, or lower throughout, and all orders and ties
    lie between.
    """
    _require_both(int(groups.plain.sum()), int(groups.flagged.sum()))
    turned = Groups(
        -groups.score.flip(0), groups.flagged.flip(0), groups.plain.flip(0), groups.width
    )
    pairs = zip(
        _auroc_bounds(groups),
        _precision_bounds(groups),
        _fpr95_bounds(groups),
        _precision_bounds(turned),
        strict=True,
    )
    least, most = (Detection(*(value.item() for value in column)) for column in pairs)
    return least, most


def _auroc_bounds(groups: Groups) -> tuple[Tensor, Tensor]:
    """All pairs of a bin count as lost, or as won."""
    below = groups.plain.cumsum(0)
    pairs = groups.plain.sum() * groups.flagged.sum()
    lost, won = (groups.flagged * (below - groups.plain)).sum(), (groups.flagged * below).sum()
    return lost / pairs, won / pairs


def _precision_bounds(groups: Groups) -> tuple[Tensor, Tensor]:
    """A bin's flagged examples come last and one by one, or first and all at once."""
    plain, flagged = groups.plain.flip(0), groups.flagged.flip(0)
    true, false = flagged.cumsum(0), plain.cumsum(0)
    before = true - flagged
    least = run(before, torch.ones_like(before), before + false, flagged)
    most = flagged * true / (true + false - plain).clamp_min(1)
    return least.sum() / true[-1], most.sum() / true[-1]


def _fpr95_bounds(groups: Groups) -> tuple[Tensor, Tensor]:
    """The threshold is above all inside of its bin, or below."""
    plain, true = groups.plain.flip(0), groups.flagged.flip(0).cumsum(0)
    needed = -(-95 * true[-1].long() // 100)
    cut = torch.searchsorted(true, needed.double())
    false = plain.cumsum(0) / plain.sum()
    return false[cut] - plain[cut] / plain.sum(), false[cut]
