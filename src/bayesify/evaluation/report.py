"""evaluate: what a Bayesian network is worth on a test set, in one object."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import Inputs, is_loader, labelled, split_batch
from bayesify.errors import SettingError
from bayesify.evaluation.classification import brier
from bayesify.evaluation.detection import Detection
from bayesify.evaluation.segmentation import at_resolution_of
from bayesify.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

SCORES = ("uncertainty", "aleatoric", "epistemic", "confidence")


@dataclass(frozen=True)
class Report:
    """Measures on a test set; those that a likelihood does not have are None.

    AURC and the detection of mistakes are by total uncertainty. Where all answers are right, or all
    wrong, there is nothing to detect, and it is None too.

    Of a segmentation, `miou` is the mean over classes of intersection over union, the NLL a mean
    over images, and everything else over pixels, at the resolution of the target; void pixels do
    not count. Measures that rank pixels count them in bins: they are off by `ranking_error` at the
    most, which is None where they are exact.

    `strategy` is how draws ran. With `bnn.strategy` set to it, the same batches and the same number
    of threads, numbers repeat to the last bit; two of them mean that batches of different sizes ran
    in different ways.
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
    miou: float | None = None
    ranking_error: float | None = None
    strategy: str = ""
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
    from bayesify.evaluation.tally import Tally

    if score not in SCORES:
        raise SettingError(f"score={score!r} must be one of {', '.join(SCORES)}.")
    others, examples, tally = ood or {}, 0, None
    model.runner.used.clear()
    for inputs, target in labelled(loader):
        prediction = model.predict(inputs, draws=draws, seed=seed)
        prediction = at_full_resolution(prediction, target)
        tally = tally or Tally(prediction, others)
        tally.add(measure(model, prediction, target, score))
        examples += len(prediction)
    assert tally is not None  # noqa: S101  (a loader without batches is an error)
    for name, other in others.items():
        for batch in other if is_loader(other) else [(other, None)]:
            inputs, target = split_batch(batch)
            strange = model.predict(inputs, draws=draws, seed=seed)
            strange = at_full_resolution(strange, _pixels(inputs) if target is None else target)
            tally.add_other(name, scored(strange, score).flatten())
    return Report(
        examples,
        **tally.measures(),
        ood=tally.detections(),
        ranking_error=tally.ranking_error(),
        strategy=" and ".join(sorted(model.runner.used)),
    )


def measure(
    model: "BayesianModel", prediction: Prediction, target: Any, score: str = "uncertainty"
) -> dict[str, Tensor]:
    """What one batch adds to the measures: numbers an example, or a pixel that counts."""
    likelihood = model.likelihood
    target = model.target_for(prediction, target)
    nll, strangeness = likelihood.nll(prediction.averages, target), scored(prediction, score)
    if likelihood.kind == "values":
        square = (prediction.mean - target).square()
        return {"nll": nll, "square": square.flatten(), "score": strangeness.flatten()}
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
        "label": prediction.label[counted],
        "target": target[counted],
        "score": strangeness[counted],
    }


def at_full_resolution(prediction: Prediction, target: Any) -> Prediction:
    """Predicted pixels at the resolution of a target `[B, H, W]`, where that is another."""
    if prediction.kind != "classes" or prediction.label.ndim != 3:
        return prediction
    wanted = torch.as_tensor(target)
    if wanted.ndim != 3:
        return prediction
    averages = prediction.averages.items()
    return Prediction(
        "classes", {name: at_resolution_of(wanted, value) for name, value in averages}
    )


def _pixels(inputs: Inputs) -> Tensor:
    """What has the shape that a target would have: one channel of images."""
    first = next(iter(inputs.tensors()))
    return first[:, 0] if first.ndim == 4 else first


def scored(prediction: Prediction, score: str) -> Tensor:
    """The score by which data are told apart: higher is stranger."""
    value: Tensor = getattr(prediction, score)
    return -value if score == "confidence" else value
