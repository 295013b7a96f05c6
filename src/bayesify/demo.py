"""The demo: a small digits network beside Bayesian ones made from it, and a report on them.

Needs no download: network and data come with bayesify and scikit-learn. Settings were chosen on
the training and validation digits; the test digits and the things that are no digits only judge.
"""

import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from bayesify.compare import compare
from bayesify.data import load_data
from bayesify.evaluation import plots
from bayesify.evaluation.comparison import Comparison
from bayesify.evaluation.plots import Judged
from bayesify.evaluation.verdict import judge
from bayesify.files import write_bytes
from bayesify.io import load
from bayesify.methods import ABNN, IBNN, MAP, BayesAdapter, Temperature
from bayesify.model import convert
from bayesify.zoo import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALIDATION, CALIBRATION = "digits:validation[:135]", "digits:validation[135:]"
STRANGE = {"rotated": "digits-rotated", "noise": "digits-noise", "photos": "digits-photos"}
# Rates below the defaults, statistics as they are: the network is small, and soon leaves the
# optimum.
METHODS = (
    MAP(),
    Temperature(),
    ABNN(lr=3e-4),
    BayesAdapter(lr=3e-5, adapt_statistics=False),
    IBNN(lr=3e-5, adapt_statistics=False),
)
EPOCHS = 5
BATCH = 32
SURE = 0.9
WIDE = 120  # characters that the table needs to show intervals on one line each


def run(output: Path, seed: int, console: Console, *, progress: bool = True) -> Comparison:
    """Runs the demo and writes the report, the numbers and the Bayesian networks to `output`.

    Args:
        output: A folder; files of an earlier run are replaced, each as a whole.
        seed: Of training and draws.
        console: Where to print.
        progress: Shows progress.
    """
    started = time.monotonic()
    network = load_model("digits")
    console.print(
        f"Making a trained digits network Bayesian in three ways, {EPOCHS} epochs each, and "
        "judging them beside the network itself and temperature scaling: on digits they have not "
        "seen, and on things that are no digits."
    )
    with _one_thread():
        found = compare(
            network,
            "digits:train",
            test="digits:test",
            methods=METHODS,
            validation=VALIDATION,
            calibration=CALIBRATION,
            ood=STRANGE,
            augment=shift,
            epochs=EPOCHS,
            batch_size=BATCH,
            seed=seed,
            output=output,
            command=f"bayesify demo --seed {seed}",
            progress=progress,
        )
        write_bytes(output / "gallery.png", _png(surest(output / "abnn", seed)))
    console.print(found.table(intervals=console.width >= WIDE))
    verdict = judge(found.results)
    for sentence in (verdict.headline, *verdict.reasons):
        console.print(sentence, markup=False)
    console.print(
        f"\nSeed {seed}, {time.monotonic() - started:.0f} s. Open this in a browser:\n"
        f"  {output / 'report.html'}\n"
        "Now do it with a network of your own:\n"
        "  bayesify compare path/to/file.py:build train.npz --weights weights.safetensors "
        "--test test.npz",
        markup=False,
        soft_wrap=True,
    )
    return found


def surest(folder: Path, seed: int, each: int = 6) -> "Figure":
    """Mistakes, turned digits and photographs that the network is sure of, and what ABNN says.

    Chosen by the network's confidence alone, whatever ABNN makes of them.

    Args:
        folder: Where ABNN was saved.
        seed: Of the draws.
        each: At most so many of each kind.
    """
    network = load_model("digits")
    plain, bnn = convert(network, MAP()), load(folder, network)
    shown = []
    for spec, title in (
        ("digits:test", "a {}"),
        ("digits-rotated", "a turned digit"),
        ("digits-photos", "part of a photo"),
    ):
        images, *target = _whole(spec)
        before, after = (model.predict(images, seed=seed) for model in (plain, bnn))
        confidence, order = before.confidence.sort(descending=True)
        if target:
            rows = order[(before.label != target[0])[order]][:each]
        else:
            sure = order[confidence > SURE]
            rows = sure[torch.linspace(0, len(sure) - 1, min(each, len(sure))).long()]
        for row in rows.tolist():
            first, second = (
                (str(said.label[row].item()), said.confidence[row].item())
                for said in (before, after)
            )
            truth = title.format(target[0][row]) if target else title
            doubt = after.epistemic[row].item()
            shown.append(Judged(images[row], truth, first, second, doubt))
    return plots.gallery(
        shown,
        names=("network", "ABNN"),
        title="Where the network is sure and should not be",
        chosen="Shown: its surest mistakes, and, of the others\n"
        f"that it is over {SURE:.0%} sure of, some evenly spaced by its confidence.",
    )


def shift(images: Tensor) -> Tensor:
    """Shifts each image by up to one pixel either way, filling with black."""
    batch, _, height, width = images.shape
    padded = pad(images, (1, 1, 1, 1)).movedim(1, -1)
    rows = torch.randint(0, 3, (batch, 1)) + torch.arange(height)
    columns = torch.randint(0, 3, (batch, 1)) + torch.arange(width)
    picked = padded[torch.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.movedim(-1, 1)


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


def _whole(spec: str) -> tuple[Tensor, ...]:
    return tuple(next(iter(DataLoader(load_data(spec), batch_size=1 << 20))))


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
