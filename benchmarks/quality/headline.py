"""The headline: each method fitted on training data, measured as fitted, and calibrated.

What was fitted is kept in a folder outside git, under a hash of all it was made from, so that
everything else is measured on the very same state.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayesify
from bayesify import MAP, BayesianModel, Method, Mixture
from bayesify.data import CIFAR10_NORMALISATION
from bayesify.mixing import part_file, remove_checkpoint
from bayesify.zoo import load_model
from benchmarks.quality.labels import batches, images, test_data, test_labels, training_batches
from benchmarks.quality.measures import detection, quality
from benchmarks.quality.results import write_json
from benchmarks.quality.settings import ABLATIONS, BATCH, METHODS, OTHERS, Size
from benchmarks.quality.units import Unit, fit_settings, passes

CACHE = Path(
    os.environ.get("BAYESIFY_BENCH_CACHE", Path.home() / ".cache" / "bayesify-bench" / "quality")
)
# Set where other work runs beside this: seconds would say nothing.
UNTIMED = "BAYESIFY_BENCH_UNTIMED" in os.environ


def fitted(unit: Unit, size: Size) -> tuple[BayesianModel, dict[str, Any]]:
    """The unit's method, fitted, and what the fit said."""
    method = {**METHODS, **ABLATIONS}[unit.method]
    split = f"cifar10:train[:{size.trained_on(unit.method)}]"
    return fit_or_load(load_model(unit.network), method, split, fit_settings(unit), unit)


def fit_or_load(
    model: nn.Module, method: Method, split: str, settings: dict[str, Any], unit: Unit
) -> tuple[BayesianModel, dict[str, Any]]:
    """A fitted network from the cache, or fitted now; a fit that was stopped goes on."""
    if type(method) is MAP:
        return bayesify.convert(model, method), {"fit_seconds": 0.0, "megabytes": 0.0}
    made_from = _made_from(method, split, settings, unit)
    folder = _folder(unit, made_from)
    facts, checkpoint = Path(f"{folder}.json"), Path(f"{folder}.checkpoint")
    if facts.exists():
        return bayesify.load(folder, model), json.loads(facts.read_text())
    CACHE.mkdir(parents=True, exist_ok=True)
    bnn = bayesify.convert(model, method)
    started = time.monotonic()
    result = bnn.fit(
        training_batches(split),
        seed=unit.seed,
        checkpoint=checkpoint,
        progress=sys.stderr.isatty(),
        normalisation=CIFAR10_NORMALISATION,
        **settings,
    )
    session = time.monotonic() - started
    bnn.save(folder)
    found = {
        # The clock of a fit that was resumed runs over all sessions, but for the first validation.
        "fit_seconds": None if UNTIMED else max(session, result.seconds),
        "megabytes": sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        "steps": result.steps,
        "kept": result.kept,
        "held_out_nll": {
            "network": result.network_nll,
            "untrained": [part.untrained_nll for part in result.parts] or result.untrained_nll,
            "kept": result.nll,
        },
        "made_from": made_from,
    }
    write_json(facts, found)
    for index, part in enumerate(method.parts if isinstance(method, Mixture) else ()):
        # Its fit is that of the method alone, which goes on from there to a temperature.
        if alone := [name for name, other in METHODS.items() if other == part]:
            theirs = _folder(
                replace(unit, method=alone[0]), _made_from(part, split, settings, unit)
            )
            part_file(checkpoint, index).rename(f"{theirs}.checkpoint")
    remove_checkpoint(checkpoint)
    return bnn, found


def _made_from(method: Method, split: str, settings: dict[str, Any], unit: Unit) -> list[Any]:
    return [unit.network, repr(method), passes(method), unit.seed, split, BATCH, settings]


def _folder(unit: Unit, made_from: list[Any]) -> Path:
    mark = hashlib.blake2b(json.dumps(made_from).encode(), digest_size=8).hexdigest()
    return CACHE / f"{unit.network}-{unit.method}-seed{unit.seed}-{mark}"


def fit(unit: Unit, size: Size) -> dict[str, Any]:
    """What the fit cost, and what came of it."""
    bnn, found = fitted(unit, size)
    return {
        **found,
        "noise": bnn.noise,
        "temperature": bnn.temperature,
        "mirrored": bnn.mirrored,
    }


def train_only(unit: Unit, size: Size) -> dict[str, Any]:
    """As fitted, on all test images."""
    bnn, _ = fitted(unit, size)
    return judge(bnn, unit, size, slice(size.test), slice(size.other))


def calibrated(unit: Unit, size: Size) -> dict[str, Any]:
    """Calibrated on one half of the test images and measured on the other.

    Every second image of the other sets is shown to each: AUPR depends on how many there are.
    """
    half = size.test // 2
    halves = [slice(half), slice(half, size.test)]
    own = int(unit.what[-1])
    bnn, _ = fitted(unit, size)
    data = batches(test_data(rows("cifar10:test", halves[own]), unit.name))
    started = time.monotonic()
    bnn.calibrate(data, seed=unit.seed)
    seconds = None if UNTIMED else time.monotonic() - started
    found = judge(bnn, unit, size, halves[1 - own], slice(own, size.other, 2))
    return {"calibrate_seconds": seconds, **found}


def judge(
    bnn: BayesianModel,
    unit: Unit,
    size: Size,
    tested: slice,
    other: slice,
    others: Sequence[str] = OTHERS,
) -> dict[str, Any]:
    """All measures on these test images, and on these of each other set."""
    target = test_labels(rows("cifar10:test", tested), unit.name)
    probs, milliseconds = predicted(bnn, unit, size, "cifar10:test", tested)
    strange = {name: predicted(bnn, unit, size, name, other)[0] for name in others}
    return {
        **quality(probs, target),
        "ood": detection(probs, strange),
        "images": len(target),
        "predict_ms": milliseconds,
        "draws": bnn.method.draws,
        "noise": bnn.noise,
        "temperature": bnn.temperature,
        "slope": bnn.slope,
        "mirrored": bnn.mirrored,
    }


def predicted(
    bnn: BayesianModel, unit: Unit, size: Size, name: str, part: slice
) -> tuple[Tensor, float | None]:
    """Probabilities of some rows of a set, and milliseconds that each took, if that was timed.

    What draws say of all rows is kept as it is before the temperature, which is all that
    `calibrate` changes as a rule: then nothing has to run again.
    """
    everything = slice(size.test if name == "cifar10:test" else size.other)
    about = [repr(bnn.method), passes(bnn.method), fit_settings(unit), size.trained_on(unit.method)]
    state = [bnn.noise, bnn.mirrored, rows(name, everything)]
    file = _folder(unit, about + state).with_suffix(".safetensors")
    if file.exists():
        averages = load_file(file)
        spent = averages.pop("milliseconds").item() or None
        averages = {key: value[part] for key, value in averages.items()}
    else:
        x = images(rows(name, part))
        started = time.monotonic()
        with untempered(bnn):
            averages = bnn.predict(batches(x), seed=unit.seed).averages
        spent = None if UNTIMED else 1000 * (time.monotonic() - started) / len(x)
        if part == everything:
            CACHE.mkdir(parents=True, exist_ok=True)
            save_file({**averages, "milliseconds": torch.tensor(spent or 0.0)}, file)
    return bnn.pool(averages)["probs"], spent


@contextmanager
def untempered(bnn: BayesianModel) -> Iterator[None]:
    """Inside it, predictions are what draws say in the mean, before the temperature."""
    before = bnn.temperature, bnn.slope
    bnn.temperature, bnn.slope = 1.0, 0.0
    try:
        yield
    finally:
        bnn.temperature, bnn.slope = before


def rows(name: str, part: slice) -> str:
    """The name of some rows of a set."""
    start, stop, step = ("" if at is None else str(at) for at in (part.start, part.stop, part.step))
    return f"{name}[{start}:{stop}{step and f':{step}'}]"
