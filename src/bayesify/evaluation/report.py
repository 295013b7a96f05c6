"""evaluate: what a Bayesian network is worth on a test set, in one object."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import labelled
from bayesify.errors import SettingError
from bayesify.evaluation.calibration import adaptive_calibration_error, calibration_error
from bayesify.evaluation.classification import brier
from bayesify.evaluation.detection import Detection, auroc, detect
from bayesify.evaluation.selective import aurc
from bayesify.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

SCORES = ("uncertainty", "aleatoric", "epistemic", "confidence")


@dataclass(frozen=True)
class Report:
    """Measures on a test set; those that a likelihood does not have are None.

    AURC and the detection of mistakes are by total uncertainty. Where all answers are right, or all
    wrong, there is nothing to detect, and it is None too.
    """

    examples: int
    nll: float
    accuracy: float | None = None
    ece: float | None = None
    adaptive_ece: float | None = None
    brier: float | None = None
    aurc: float | None = None
    mistakes_auroc: float | None = None
    rmse: float | None = None
    ood: Mapping[str, Detection] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        lines = [f"{'examples':<16}{self.examples}"]
        for name, value in asdict(self).items():
            if isinstance(value, float):
                lines.append(f"{name:<16}{value:.4f}")
        for name, found in self.ood.items():
            lines.append(
                f"{name:<16}AUROC {found.auroc:.4f}  AUPR {found.aupr:.4f}  FPR95 {found.fpr95:.4f}"
            )
        return "\n".join(lines)


def evaluate(
    model: "BayesianModel",
    loader: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any]] | None = None,
    draws: int | None = None,
    seed: int = 0,
    score: str = "uncertainty",
) -> Report:
    """Measures a Bayesian network; see `BayesianModel.evaluate`."""
    if score not in SCORES:
        raise SettingError(f"score={score!r} must be one of {', '.join(SCORES)}.")
    columns: dict[str, list[Tensor]] = {}
    examples = 0
    for inputs, target in labelled(loader):
        prediction = model.predict(inputs, draws=draws, seed=seed)
        examples += len(prediction)
        for name, value in measure(model, prediction, target).items():
            columns.setdefault(name, []).append(value.cpu())
        columns.setdefault("score", []).append(scored(prediction, score))
    whole = {name: torch.cat(values) for name, values in columns.items()}
    found = {}
    for name, other in (ood or {}).items():
        outside = scored(model.predict(other, draws=draws, seed=seed), score)
        found[name] = detect(whole["score"], outside)
    return summarise(whole, examples, found)


def measure(model: "BayesianModel", prediction: Prediction, target: Any) -> dict[str, Tensor]:
    """What one batch adds to the measures: numbers an example, or a pixel."""
    likelihood = model.likelihood
    target = model.target_for(prediction, target)
    nll = likelihood.nll(prediction.averages, target)
    if likelihood.kind == "values":
        return {"nll": nll, "square": (prediction.mean - target).square().flatten()}
    correct = prediction.label == target
    if likelihood.kind == "labels":
        gap = (prediction.probs - target).square()
        counted = torch.ones_like(correct)
    else:
        counted = target != getattr(likelihood, "ignore_index", -100)
        gap = brier(prediction.probs, torch.where(counted, target, 0))
    return {
        "nll": nll,
        "correct": correct[counted],
        "confidence": prediction.confidence[counted],
        "brier": gap[counted],
        "doubt": prediction.uncertainty[counted],
    }


def summarise(columns: Mapping[str, Tensor], examples: int, ood: Mapping[str, Detection]) -> Report:
    """Averages what `measure` collected."""
    nll = columns["nll"].double().mean().item()
    if "square" in columns:
        return Report(examples, nll, rmse=columns["square"].mean().sqrt().item(), ood=ood)
    correct, confidence, doubt = (columns[name] for name in ("correct", "confidence", "doubt"))
    telling = correct.any() and not correct.all()
    return Report(
        examples,
        nll,
        accuracy=correct.double().mean().item(),
        ece=calibration_error(confidence, correct),
        adaptive_ece=adaptive_calibration_error(confidence, correct),
        brier=columns["brier"].double().mean().item(),
        aurc=aurc(doubt, correct),
        mistakes_auroc=auroc(doubt[correct], doubt[~correct]) if telling else None,
        ood=ood,
    )


def scored(prediction: Prediction, score: str) -> Tensor:
    """The score by which data are told apart: higher is stranger."""
    value: Tensor = getattr(prediction, score)
    value = value.flatten().cpu()
    return -value if score == "confidence" else value
