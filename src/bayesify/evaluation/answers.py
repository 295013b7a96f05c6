"""What a Bayesian network answered to the examples of a set, and everything that follows from it.

A set is gone through once, batch by batch. Of each example a few numbers are kept, of a few
examples the picture too: all measures, their intervals and curves are made of these.
"""

import base64
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import Inputs, labelled, split_batch
from bayesify.errors import DataError, SettingError
from bayesify.evaluation import bootstrap
from bayesify.evaluation.calibration import (
    adaptive_calibration_error,
    calibration_error,
    classwise_sums,
    gap,
    reliability_curve,
)
from bayesify.evaluation.classification import brier, decompose
from bayesify.evaluation.detection import aupr, aupr_inside, auroc, fpr95
from bayesify.evaluation.selective import COVERAGES, accuracy_at_coverage, aurc, risk_coverage
from bayesify.outliers import Normalisation
from bayesify.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

REVISION = 2  # of what is measured: what an earlier one found is measured again
HIGHER_IS_BETTER = ("accuracy", "auroc", "aupr")
SHOWN = 8
LARGEST_PICTURE = 96
POINTS = 200
ENTROPY_BINS = 30


@dataclass
class Answers:
    """Numbers of the examples of a set, each `[N]`.

    Args:
        kind: "classes", "labels" or "values", as of a `Prediction`.
        classes: How many there are; None if there is no such number.
        numbers: `uncertainty`, `aleatoric`, `epistemic`; of classes `label` and `confidence`; where
            there are targets `target`, `nll`, `correct`, `brier`, or `square` of values; and
            `index`, the place in the set.
        pictures: Chosen examples by what they are chosen for, the most striking first.
        sums: Of classes that there are targets for, by bins of their probability, `[3, C, bins]`;
            see `classwise_sums`.
    """

    kind: str
    classes: int | None
    numbers: dict[str, Tensor]
    pictures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sums: Tensor | None = None

    def __len__(self) -> int:
        return len(self.numbers["uncertainty"])


def ask(
    model: "BayesianModel",
    loader: Iterable[Any],
    name: str,
    *,
    targets: bool,
    draws: int | None = None,
    seed: int = 0,
    normalisation: Normalisation | None = None,
) -> Answers:
    """Goes through a set once.

    Args:
        model: What is asked.
        loader: Batches, with a target each if `targets`.
        name: What the set is called, in what is shown of it.
        targets: Whether there are targets to judge by.
        draws: Draws of a prediction.
        seed: Seed of the draws.
        normalisation: By which images were normalised, so that they can be shown.

    Raises:
        DataError: If there is no example.
        SettingError: If a prediction has many classes an example, as of pixels.
    """
    columns: dict[str, list[Tensor]] = {}
    gallery = _Gallery(name, normalisation)
    kind, classes, sums, start = model.likelihood.kind, None, None, 0
    for inputs, target in labelled(loader) if targets else _unlabelled(loader):
        prediction = model.predict(inputs, draws=draws, seed=seed)
        found = numbers_of(model, prediction, target)
        found["index"] = torch.arange(start, start + len(inputs))
        if "target" in found:
            counted = found["target"] != getattr(model.likelihood, "ignore_index", -100)
            found = {column: values[counted] for column, values in found.items()}
            if counted.any():
                added = classwise_sums(prediction.probs.cpu()[counted], found["target"])
                sums = added if sums is None else sums + added
        if kind == "classes":
            classes = prediction.probs.shape[1]
            gallery.add(found, inputs, start)
        for column, values in found.items():
            columns.setdefault(column, []).append(values)
        start += len(inputs)
    whole = {column: torch.cat(parts) for column, parts in columns.items()}
    if not whole or not len(whole["index"]):
        raise DataError(f"{name} has no example that counts: there is nothing to measure.")
    return Answers(kind, classes, whole, gallery.shown(), sums)


def numbers_of(model: "BayesianModel", prediction: Prediction, target: Any) -> dict[str, Tensor]:
    """What is kept of a batch; of several values or labels an example, their mean."""
    doubts = ("uncertainty", "aleatoric", "epistemic")
    found = {name: _each(getattr(prediction, name)) for name in doubts}
    if prediction.kind == "classes":
        if prediction.label.ndim > 1:
            raise SettingError(
                "compare takes networks with one answer an example, and this one has an answer for "
                "every position. Use bnn.evaluate, or evaluation.segmentation."
            )
        found |= {"label": prediction.label.cpu(), "confidence": _each(prediction.confidence)}
    if target is None:
        return found
    wanted = model.target_for(prediction, target)
    found["nll"] = _each(model.likelihood.nll(prediction.averages, wanted))
    if prediction.kind == "values":
        found["square"] = _each((prediction.mean - wanted).square())
        return found
    found["correct"] = _each(prediction.label == wanted)
    if prediction.kind == "classes":
        found["target"] = wanted.cpu()
        found["brier"] = _each(
            brier(prediction.probs, wanted.clamp(0, prediction.probs.shape[1] - 1))
        )
    else:
        found["brier"] = _each((prediction.probs - wanted).square())
    return found


def measures(answers: Answers) -> tuple[dict[str, float | None], dict[str, bootstrap.Measure]]:
    """The measures of a test set: their values, and as functions of weights where they have one.

    A value is None where there is nothing to measure: mistakes, if there are none.
    """
    of = answers.numbers
    functions = {"nll": bootstrap.mean_of(of["nll"])}
    values: dict[str, float | None] = {"nll": of["nll"].mean().item()}
    if answers.kind == "values":
        functions["rmse"] = bootstrap.root_mean_of(of["square"])
        return values | {"rmse": of["square"].mean().sqrt().item()}, functions
    for name, column in {"accuracy": "correct", "brier": "brier"}.items():
        functions[name], values[name] = bootstrap.mean_of(of[column]), of[column].mean().item()
    if answers.kind == "classes":
        for name, (value, function) in _of_confidence(answers).items():
            functions[name], values[name] = function, value
        values |= _of_each_class(answers) | _of_mistakes(answers)
    order = ("accuracy", "nll", "ece", "brier", "aurc")
    names = [*(name for name in order if name in values), *(n for n in values if n not in order)]
    return {name: values[name] for name in names}, functions


def _of_confidence(answers: Answers) -> dict[str, tuple[float, bootstrap.Measure]]:
    """Calibration of the answers, and what is to be had by holding some back."""
    columns = ("confidence", "uncertainty", "correct")
    said, doubt, right = (answers.numbers[name] for name in columns)
    mistakes = bootstrap.Ranked(doubt, right == 0)
    adaptive = bootstrap.adaptive_calibration_error_of(said, right)
    return {
        "ece": (calibration_error(said, right), bootstrap.calibration_error_of(said, right)),
        "aurc": (aurc(doubt, right), bootstrap.aurc_of(mistakes)),
        **{
            f"accuracy_at_{100 * share:g}": (
                accuracy_at_coverage(doubt, right, share),
                bootstrap.accuracy_at_coverage_of(mistakes, share),
            )
            for share in COVERAGES
        },
        "adaptive_ece": (adaptive_calibration_error(said, right), adaptive),
    }


def _of_each_class(answers: Answers) -> dict[str, float | None]:
    """What takes the probabilities of all classes, of which sums were kept."""
    if answers.sums is None:
        return {}
    parts = decompose(answers.sums, answers.numbers["brier"].mean().item())
    return {
        "classwise_ece": gap(answers.sums).mean().item(),
        **{f"brier_{name}": value for name, value in asdict(parts).items()},
    }


def _of_mistakes(answers: Answers) -> dict[str, float | None]:
    """How well uncertainty tells mistakes from right answers; None where it is all one."""
    doubt, right = answers.numbers["uncertainty"], answers.numbers["correct"] == 1
    telling = bool(right.any()) and not bool(right.all())
    return {
        f"mistakes_{name}": f(doubt[right], doubt[~right]) if telling else None
        for name, (f, _) in DETECTION.items()
    }


def detection(
    inside: Answers, outside: Answers
) -> tuple[dict[str, float], dict[str, bootstrap.Measure]]:
    """How well uncertainty tells another set from the test set: values and functions of weights."""
    known, strange = inside.numbers["uncertainty"], outside.numbers["uncertainty"]
    values = {name: f(known, strange) for name, (f, _) in DETECTION.items()}
    sets = bootstrap.Ranked.between(known, strange)
    functions = {name: resampled(sets) for name, (_, resampled) in DETECTION.items()}
    return values, functions


DETECTION = {
    "auroc": (auroc, bootstrap.auroc_of),
    "aupr": (aupr, bootstrap.aupr_of),
    "fpr95": (fpr95, bootstrap.fpr95_of),
    "aupr_inside": (aupr_inside, bootstrap.aupr_inside_of),
}


def curves(test: Answers, ood: Mapping[str, Answers]) -> dict[str, Any]:
    """What is drawn of classes: reliability, risk against coverage, and entropies."""
    if test.kind != "classes" or test.classes is None:
        return {"reliability": None, "risk_coverage": None, "entropy": None}
    of = test.numbers
    reliability = reliability_curve(of["confidence"], of["correct"])
    risk = risk_coverage(of["uncertainty"], of["correct"])
    points = len(risk.risk)
    shown = torch.linspace(0, points - 1, min(POINTS, points)).round().long()
    edges = torch.linspace(0, math.log(test.classes), ENTROPY_BINS + 1, dtype=torch.float64)

    def shares(answers: Answers) -> list[float]:
        inner = torch.bucketize(answers.numbers["uncertainty"], edges[1:-1], right=True)
        counts = torch.bincount(inner, minlength=ENTROPY_BINS)
        return (counts / len(answers)).tolist()

    return {
        "reliability": {
            "confidence": reliability.confidence.tolist(),
            "accuracy": reliability.accuracy.tolist(),
            "count": reliability.count.long().tolist(),
        },
        "risk_coverage": {
            "coverage": risk.coverage[shown].tolist(),
            "risk": risk.risk[shown].tolist(),
        },
        "entropy": {
            "edges": edges.tolist(),
            "test": shares(test),
            "ood": {name: shares(other) for name, other in ood.items()},
        },
    }


def per_class(test: Answers) -> list[dict[str, Any]]:
    """Accuracy, confidence and entropy by the class that is true."""
    if test.kind != "classes":
        return []
    of, rows = test.numbers, []
    for label in of["target"].unique().tolist():
        those = of["target"] == label
        names = {"accuracy": "correct", "confidence": "confidence", "entropy": "uncertainty"}
        means = {name: of[column][those].mean().item() for name, column in names.items()}
        rows.append({"class": label, "examples": int(those.sum()), **means})
    return rows


class _Gallery:
    """The most striking examples so far, with their pictures."""

    def __init__(self, name: str, normalisation: Normalisation | None) -> None:
        self.name = name
        self.normalisation = normalisation
        self.found: dict[str, list[tuple[float, dict[str, Any], Tensor | None]]] = {}

    def add(self, numbers: Mapping[str, Tensor], inputs: Inputs, start: int) -> None:
        """Looks at a batch, whose first example is the set's at `start`."""
        scores = {"most_uncertain_ood": numbers["uncertainty"]}
        if "target" in numbers:
            wrong = numbers["correct"] == 0
            scores = {
                "surest_wrong": torch.where(wrong, numbers["confidence"], -math.inf),
                "most_epistemic": numbers["epistemic"],
                "most_aleatoric": numbers["aleatoric"],
            }
        for kind, score in scores.items():
            top = score.topk(min(SHOWN, len(score)))
            kept = self.found.setdefault(kind, [])
            for value, row in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                if math.isfinite(value):
                    index = int(numbers["index"][row])
                    shown = self._describe(numbers, row, index)
                    kept.append((value, shown, _image(inputs, index - start)))
            # Sorting is stable: of equals, the first stay.
            self.found[kind] = sorted(kept, key=lambda one: -one[0])[:SHOWN]

    def shown(self) -> dict[str, list[dict[str, Any]]]:
        """What was chosen, pictures as PNG."""
        return {
            kind: [
                {**shown, "image": None if image is None else picture(image, self.normalisation)}
                for _, shown, image in found
            ]
            for kind, found in self.found.items()
        }

    def _describe(self, numbers: Mapping[str, Tensor], row: int, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "set": self.name,
            "label": int(numbers["label"][row]),
            "target": int(numbers["target"][row]) if "target" in numbers else None,
            "confidence": numbers["confidence"][row].item(),
            "entropy": numbers["uncertainty"][row].item(),
            "epistemic": numbers["epistemic"][row].item(),
        }


def picture(image: Tensor, normalisation: Normalisation | None) -> str:
    """An image `[C, H, W]` of 1 or 3 channels as the address of a PNG.

    Where pixels do not run from 0 to 1, they are stretched to do so.
    """
    from PIL import Image

    pixels = image.detach().cpu().double()
    if normalisation is not None:
        mean, std = (torch.as_tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in normalisation)
        pixels = pixels * std + mean
    low, high = pixels.min().item(), pixels.max().item()
    if low < -1e-3 or high > 1 + 1e-3:
        pixels = (pixels - low) / max(high - low, 1e-12)
    levels = (pixels.clamp(0, 1) * 255).round().byte().movedim(0, -1)
    shown = Image.fromarray(levels.squeeze(-1).numpy())
    shown.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE))
    packed = io.BytesIO()
    shown.save(packed, "PNG")
    return "data:image/png;base64," + base64.b64encode(packed.getvalue()).decode()


def _image(inputs: Inputs, row: int) -> Tensor | None:
    """A copy of an input that is a picture; None of others."""
    first = inputs.args[0] if len(inputs.args) == 1 and not inputs.kwargs else None
    if not isinstance(first, Tensor) or first.ndim != 4 or first.shape[1] not in (1, 3):
        return None
    return first[row].clone() if first.is_floating_point() else None


def _unlabelled(loader: Iterable[Any]) -> Iterator[tuple[Inputs, None]]:
    for batch in loader:
        yield split_batch(batch)[0], None


def _each(values: Tensor) -> Tensor:
    """A number an example, in double precision."""
    return values.detach().cpu().double().reshape(len(values), -1).mean(1)
