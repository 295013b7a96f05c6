"""The demo: a small digits network made Bayesian, judged beside itself, and shown in pictures.

Needs no download: network and data come with bayesify and scikit-learn. Settings were chosen on
the training and validation digits; the test digits and the things that are no digits only judge.
"""

import contextlib
import io
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from bayesify.batches import as_inputs
from bayesify.calibration import best_temperature
from bayesify.data import load_data
from bayesify.evaluation import plots
from bayesify.evaluation.plots import Judged
from bayesify.evaluation.report import Report
from bayesify.files import write_bytes, write_json
from bayesify.io import load
from bayesify.methods import ABNN
from bayesify.model import BayesianModel, convert
from bayesify.prediction import Prediction
from bayesify.zoo import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORK, TEMPERED, BAYESIAN = "network", "network + temperature", "ABNN"
VALIDATION, CALIBRATION = "digits:validation[:135]", "digits:validation[135:]"
STRANGE = {
    "rotated": "digits-rotated",
    "noise": "digits-noise",
    "photos": "digits-photos",
}
# A tenth of the default rate: the network is small, and at the default it soon leaves the optimum.
METHOD = ABNN(lr=3e-4)
EPOCHS = 5
BATCH = 32
SURE = 0.9


@dataclass(frozen=True)
class Measure:
    """A row of the demo's table: how to read it off a report, and which way is better."""

    name: str
    higher_is_better: bool
    shown: str = ".4f"

    def of(self, report: Report) -> float:
        """The number in a report."""
        if self.name in report.ood:
            return report.ood[self.name].auroc
        value: float = getattr(report, self.name.lower())
        return value

    def title(self) -> str:
        """The row's heading, with an arrow towards the better."""
        what = f"AUROC {self.name}" if self.name in STRANGE else self.name
        return f"{what} {'↑' if self.higher_is_better else '↓'}"

    def text(self, report: Report) -> str:
        """The number as it is shown."""
        return format(self.of(report), self.shown)

    def best(self, reports: Mapping[str, Report]) -> set[str]:
        """Who is best, as far as the digits shown can tell."""
        values = {name: float(self.text(report).rstrip("%")) for name, report in reports.items()}
        top = (max if self.higher_is_better else min)(values.values())
        return {name for name, value in values.items() if value == top}


MEASURES = (
    Measure("Accuracy", True, ".2%"),
    Measure("NLL", False),
    Measure("ECE", False),
    Measure("Brier", False),
    *(Measure(name, True, ".3f") for name in STRANGE),
)


def run(output: Path, seed: int, console: Console, *, progress: bool = True) -> dict[str, Any]:
    """Runs the demo and writes results.json, the Bayesian network and the pictures to `output`.

    Args:
        output: A folder; files of an earlier run are replaced, each as a whole.
        seed: Of training and draws.
        console: Where to print.
        progress: Shows a progress bar.

    Returns:
        What results.json holds.
    """
    with _one_thread():
        return _run(output, seed, console, progress)


def _run(output: Path, seed: int, console: Console, progress: bool) -> dict[str, Any]:
    started = time.monotonic()
    network = load_model("digits")
    bnn = convert(network, METHOD)
    console.print(
        f"Making a trained digits network Bayesian: {METHOD.members} members of its "
        f"{len(bnn.sites)} normalisation layers, {EPOCHS} epochs."
    )
    fitted = bnn.fit(
        _loader("digits:train", shuffle=True),
        epochs=EPOCHS,
        validation=_loader(VALIDATION),
        augment=shift,
        seed=seed,
        progress=progress,
    )
    calibrated = bnn.calibrate(_loader(CALIBRATION), seed=seed)
    bnn.save(output / "digits-abnn")
    bnn = load(output / "digits-abnn", network)
    console.print(
        f"Fitted (held-out NLL {fitted.network_nll:.4f} → {fitted.nll:.4f}), calibrated "
        f"(noise {calibrated.noise:.2f}, temperature {calibrated.temperature:.2f}), saved and "
        f"loaded again. Now judging it on digits it has not seen, and on things that are no digits."
    )

    plain = convert(network, ABNN(members=1, draws=1, noise=0.0))
    tempered = convert(network, plain.method)
    tempered.temperature = _temperature(tempered)
    models = {NETWORK: plain, TEMPERED: tempered, BAYESIAN: bnn}
    strange: dict[str, Iterable[Any]] = {name: _loader(spec) for name, spec in STRANGE.items()}
    reports = {
        name: model.evaluate(_loader("digits:test"), ood=strange, seed=seed)
        for name, model in models.items()
    }
    seen = Seen(plain, bnn, seed)

    results = {
        "seed": seed,
        "settings": {
            "method": {"name": "abnn", **METHOD.to_dict()},
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "augmentation": "shift by up to one pixel",
            "validation": VALIDATION,
            "calibration": CALIBRATION,
            "ood": STRANGE,
        },
        "fit": {
            "kept": fitted.kept,
            "steps": fitted.steps,
            "network_nll": fitted.network_nll,
            "untrained_nll": fitted.untrained_nll,
            "nll": fitted.nll,
        },
        "calibration": {"noise": calibrated.noise, "temperature": calibrated.temperature},
        "network_temperature": tempered.temperature,
        "results": {name: report.to_dict() for name, report in reports.items()},
        "confidence": seen.to_dict(),
    }
    write_json(output / "results.json", results)
    for name, figure in seen.pictures().items():
        write_bytes(output / name, _png(figure))

    console.print(table(reports))
    for sentence in (*seen.sentences(), verdict(reports)):
        console.print(sentence)
    console.print(
        f"Seed {seed}, {time.monotonic() - started:.0f} s. Look at reliability.png, entropy.png "
        f"and gallery.png in {output}; every number is in results.json."
    )
    return results


class Seen:
    """What the network and the Bayesian network say of the test digits and of strange things."""

    def __init__(self, network: BayesianModel, bnn: BayesianModel, seed: int) -> None:
        self.images, self.target = _whole("digits:test")
        self.strange = {name: _whole(spec)[0] for name, spec in STRANGE.items()}
        models = {NETWORK: network, BAYESIAN: bnn}
        self.test = {name: m.predict(self.images, seed=seed) for name, m in models.items()}
        self.other = {
            name: {kind: m.predict(x, seed=seed) for kind, x in self.strange.items()}
            for name, m in models.items()
        }

    def right(self, name: str) -> Tensor:
        """Which test digits a network names rightly."""
        return self.test[name].label == self.target

    def everything_strange(self, name: str) -> Prediction:
        """What a network says of all the things that are no digits."""
        return Prediction.cat(list(self.other[name].values()))

    def to_dict(self) -> dict[str, dict[str, float | int]]:
        """How sure each network is where it is wrong, and of things that are no digits."""
        return {
            name: {
                "wrong": int((~self.right(name)).sum()),
                "mean_confidence_when_wrong": _mean(self.test[name].confidence[~self.right(name)]),
                "share_of_test_surer_than_90_percent": _mean(self.test[name].confidence > SURE),
                "share_of_strange_surer_than_90_percent": _mean(
                    self.everything_strange(name).confidence > SURE
                ),
            }
            for name in (NETWORK, BAYESIAN)
        }

    def sentences(self) -> list[str]:
        """What the numbers say, in words."""
        before, after = self.to_dict().values()
        digits = len(self.target)
        return [
            f"Of {digits} test digits the network gets {before['wrong']} wrong and is "
            f"{before['mean_confidence_when_wrong']:.0%} sure of those on average; {BAYESIAN} gets "
            f"{after['wrong']} wrong and is {after['mean_confidence_when_wrong']:.0%} sure of "
            f"those.",
            f"More than {SURE:.0%} sure of what it sees, the network is on "
            f"{before['share_of_test_surer_than_90_percent']:.0%} of the digits and on "
            f"{before['share_of_strange_surer_than_90_percent']:.0%} of the things that are none; "
            f"{BAYESIAN} on {after['share_of_test_surer_than_90_percent']:.0%} and "
            f"{after['share_of_strange_surer_than_90_percent']:.0%}.",
        ]

    def pictures(self) -> "dict[str, Figure]":
        """The demo's figures by file name."""
        names = (NETWORK, BAYESIAN)
        return {
            "reliability.png": plots.reliability_diagram(
                {name: (self.test[name].confidence, self.right(name)) for name in names},
                title=f"Does confidence mean what it says? {len(self.target)} test digits",
            ),
            "entropy.png": plots.entropy_histograms(
                {
                    name: {
                        "test digits": self.test[name].entropy,
                        "not digits": self.everything_strange(name).entropy,
                    }
                    for name in names
                },
                classes=10,
                title="How unsure it is of digits, and of things that are none",
            ),
            "gallery.png": plots.gallery(
                self.surest(),
                names=names,
                title="Where the network is sure and should not be",
                chosen="Shown: its surest mistakes, and, of the others\n"
                f"that it is over {SURE:.0%} sure of, some evenly spaced by its confidence.",
            ),
        }

    def surest(self, each: int = 6) -> list[Judged]:
        """Mistakes, turned digits and photographs that the network itself is sure of.

        Chosen by the network's confidence alone, whatever the Bayesian network makes of them.
        """
        wrong = self.test[NETWORK].confidence.masked_fill(self.right(NETWORK), 0)
        mistakes = min(each, int((wrong > 0).sum()))
        chosen = [
            self._judged(self.images, self.test, row, f"a {self.target[row]}")
            for row in wrong.argsort(descending=True)[:mistakes].tolist()
        ]
        for kind, title in (("rotated", "a turned digit"), ("photos", "part of a photo")):
            said = {name: self.other[name][kind] for name in self.other}
            confidence, order = said[NETWORK].confidence.sort(descending=True)
            sure = order[confidence > SURE]
            places = torch.linspace(0, len(sure) - 1, min(each, len(sure))).long()
            chosen += [
                self._judged(self.strange[kind], said, row, title) for row in sure[places].tolist()
            ]
        return chosen

    def _judged(
        self, images: Tensor, said: Mapping[str, Prediction], row: int, title: str
    ) -> Judged:
        before, after = (
            (str(said[name].label[row].item()), said[name].confidence[row].item())
            for name in (NETWORK, BAYESIAN)
        )
        return Judged(images[row], title, before, after, said[BAYESIAN].epistemic[row].item())


def shift(images: Tensor) -> Tensor:
    """Shifts each image by up to one pixel either way, filling with black."""
    batch, _, height, width = images.shape
    padded = pad(images, (1, 1, 1, 1)).movedim(1, -1)
    rows = torch.randint(0, 3, (batch, 1)) + torch.arange(height)
    columns = torch.randint(0, 3, (batch, 1)) + torch.arange(width)
    picked = padded[torch.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.movedim(-1, 1)


def table(reports: Mapping[str, Report]) -> Table:
    """The measures of each network, the best of every row in green with a star."""
    shown = Table(
        title="On test digits, and on rotated digits, noise and photographs",
        caption="* best of the row. Arrows: which way is better. AUROC: how well\n"
        "predictive entropy alone tells digits from the others.",
    )
    shown.add_column("")
    for name in reports:
        shown.add_column(name, justify="right")
    for measure in MEASURES:
        best = measure.best(reports)
        shown.add_row(
            measure.title(),
            *(
                f"[bold green]{measure.text(report)}*" if name in best else measure.text(report)
                for name, report in reports.items()
            ),
        )
    return shown


def verdict(reports: Mapping[str, Report]) -> str:
    """In how many measures the Bayesian network is best, and who is better where it is not."""
    others = {
        measure: measure.best(reports)
        for measure in MEASURES
        if BAYESIAN not in measure.best(reports)
    }
    ahead = len(MEASURES) - len(others)
    sentence = f"{BAYESIAN} is best, or level with the best, in {ahead} of {len(MEASURES)} measures"
    if not others:
        return f"{sentence}."
    where = (
        f"{measure.title()[:-2]} ({measure.text(reports[BAYESIAN])} against "
        f"{measure.text(reports[next(iter(best))])} of {' and '.join(sorted(best))})"
        for measure, best in others.items()
    )
    return f"{sentence}, and not in {', '.join(where)}."


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread.

    On images this small a second one only waits: on a busy machine of two cores it made the demo
    seven times slower. It also makes the numbers the same whatever the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _loader(spec: str, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(load_data(spec), batch_size=BATCH if shuffle else 256, shuffle=shuffle)


def _whole(spec: str) -> tuple[Tensor, ...]:
    return tuple(next(iter(DataLoader(load_data(spec), batch_size=1 << 20))))


def _temperature(model: BayesianModel) -> float:
    """The temperature that suits a model without noise, by the calibration digits."""
    images, target = _whole(CALIBRATION)
    with torch.no_grad():
        outputs = torch.cat(list(model.outputs(as_inputs(images))))
    return best_temperature(model.likelihood, outputs, target)[0]


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
