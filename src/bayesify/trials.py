"""Trials of methods: each is fitted, calibrated, saved and measured, once.

What was fitted and what was measured are kept under a hash of all they depend on, so that neither
is done again until something of that changes.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.augmentation import Augment
from bayesify.batches import Inputs, labelled
from bayesify.errors import BayesifyError, BayesifyWarning, CorruptFileError, DataError
from bayesify.evaluation import answers, bootstrap
from bayesify.evaluation.pixels import Scale
from bayesify.evaluation.shifts import sweep
from bayesify.files import fingerprint, read_json, write_json
from bayesify.identity import digest, identify_files, identify_function
from bayesify.io import load, require_free, save
from bayesify.likelihood import Likelihood
from bayesify.memory import PeakMemory
from bayesify.methods import MAP, Method, method_name
from bayesify.mixing import remove_checkpoint
from bayesify.model import BayesianModel, convert
from bayesify.outliers import Normalisation
from bayesify.posterior import key
from bayesify.validation import seeded

FORMAT = 1
STRANGEST = "most_uncertain_ood"
SHIFT_EXAMPLES = 500
TIMED_EXAMPLES = 64
REPEATS = (5, 100)  # least and most
TIMED_SECONDS = 0.5


@dataclass(frozen=True)
class DataSet:
    """Data with a name and a hash of what it holds."""

    name: str
    loader: Iterable[Any]
    identity: str


@dataclass(kw_only=True)
class Trials:
    """The trials of a comparison; see `compare` for what is not said here.

    Args:
        model: The network.
        likelihood: What its output means.
        train: Trained on.
        test: Judges.
        validation: Decides what a fit keeps.
        calibration: Chooses noise and temperature.
        ood: Sets of other kinds, by name.
        augment: Of training inputs.
        epochs: Passes over the data, or None for each method's own number.
        draws: Draws of a prediction, or None for each method's own.
        seed: Of everything.
        normalisation: Of images.
        shift: How images get worse, or None.
        folder: Where all is kept.
        progress: Shows progress.
    """

    model: nn.Module
    likelihood: Likelihood
    train: DataSet
    test: DataSet
    validation: DataSet | None
    calibration: DataSet | None
    ood: Mapping[str, DataSet]
    augment: str | Augment | None
    epochs: int | None
    draws: int | None
    seed: int
    normalisation: Normalisation | None
    shift: str | None
    folder: Path
    progress: bool

    def __post_init__(self) -> None:
        self.cache = self.folder / "cache"
        self.plain = convert(self.model, MAP(), likelihood=self.likelihood)
        self.first = next(labelled(self.test.loader))[0]
        if self.shift is not None and not _shows_pixels(self.first, self.normalisation):
            self.shift = None
        # Weights, and the code and shape of what they are in.
        self.network = [fingerprint(self.model), identify_function(self.model)]

    def run(
        self, methods: Mapping[str, Method], baseline: str, *, optional: bool
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What was found of each method, and why some were left out."""
        from tqdm.auto import tqdm

        for name in methods:
            require_free(self.folder / name)
        records: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        hidden = not self.progress
        with tqdm(total=len(methods), disable=hidden, desc="compare", unit="method") as bar:
            for name, method in methods.items():
                bar.set_description(f"compare: {name}")
                try:
                    records[name] = self._record(name, method)
                except BayesifyError as error:
                    if not optional or name == baseline:
                        raise
                    left_out[name] = str(error)
                    warnings.warn(f"{name} is left out: {error}", BayesifyWarning, stacklevel=3)
                bar.update()
        return records, left_out

    def describe(self, command: str | None, classes: Sequence[str] | None) -> dict[str, Any]:
        """What the results are of."""
        from bayesify import __version__

        names = classes or getattr(getattr(self.test.loader, "dataset", None), "classes", None)
        sizes = self.sizes
        return {
            "format": FORMAT,
            "bayesify": __version__,
            "command": command,
            "seed": self.seed,
            "network": {
                "class": type(self.model).__name__,
                "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            },
            "data": {
                "test": {"name": self.test.name, "examples": sizes["test"]},
                "ood": sizes["ood"],
            },
            "classes": None if names is None else [str(name) for name in names],
        }

    # One method

    def _record(self, name: str, method: Method) -> dict[str, Any]:
        """What was measured, from an earlier run if nothing of it changed."""
        made_from = self._made_from(method)
        asked = {
            "fit": made_from,
            "test": [self.test.name, self.test.identity],
            "ood": {other: one.identity for other, one in self.ood.items()},
            "draws": self._draws(method),
            "seed": self.seed,
            "shift": self.shift,
            "normalisation": self.normalisation,
            "resamples": bootstrap.RESAMPLES,
            "measures": answers.REVISION,
        }
        file = self.cache / f"{digest(asked)}.json"
        fitted = self._fitted_before(name, made_from)
        record = _read_record(file)
        if fitted is None or record is None:
            bnn, fitted = self._fit(name, method, made_from, fitted)
            record = self.judge(bnn)
            write_json(file, record)
        self.sizes = record["sizes"]
        cost = {name: fitted[name] for name in ("fit_seconds", "calibrate_seconds")}
        usual = "network" if type(method) is MAP else type(method).__name__
        title = usual if method_name(method) == name else name
        about = {"title": title, "settings": method.to_dict(), "fit": fitted["fit"]}
        return {**record, **about, "cost": {**cost, **record["cost"], "bytes": fitted["bytes"]}}

    def _made_from(self, method: Method) -> str:
        """A hash of all that a fitted method depends on."""
        from bayesify import __version__

        own = [type(self.likelihood).__qualname__, self.likelihood.settings()]
        content: dict[str, Any] = {
            "bayesify": __version__,
            "network": self.network,
            "method": [method_name(method), method.to_dict()],
            "likelihood": [*own, identify_function(self.likelihood.output)],
        }
        if not self._is_ready(method):
            held, spare = self.validation, self.calibration
            content |= {
                "train": self.train.identity,
                "validation": None if held is None else held.identity,
                "calibration": None if spare is None else spare.identity,
                "augment": identify_function(self.augment),
                "epochs": method.epochs if self.epochs is None else self.epochs,
                "draws": self._draws(method),
                "seed": self.seed,
                "normalisation": self.normalisation,
            }
        return digest(content)

    def _fitted_before(self, name: str, made_from: str) -> dict[str, Any] | None:
        """What an earlier fit said, if the folder still holds what it wrote."""
        record = _read_record(self.cache / f"fit-{made_from}.json")
        folder = self.folder / name
        if record is None or not folder.is_dir():
            return None
        return record if identify_files(folder) == record.get("files") else None

    def _fit(
        self, name: str, method: Method, made_from: str, before: dict[str, Any] | None
    ) -> tuple[BayesianModel, dict[str, Any]]:
        """Fits, calibrates and saves; or loads what was."""
        folder = self.folder / name
        if before is not None:
            return load(folder, self.model, likelihood=self.likelihood), before
        bnn = convert(self.model, method, likelihood=self.likelihood)
        checkpoint = self.cache / f"fit-{made_from}.safetensors"
        self.cache.mkdir(parents=True, exist_ok=True)
        fitted, fit_seconds, calibrate_seconds = None, 0.0, 0.0
        if not self._is_ready(method):
            with _named_warnings(name):
                fitted = bnn.fit(
                    self.train.loader,
                    epochs=self.epochs,
                    validation=None if self.validation is None else self.validation.loader,
                    augment=self.augment,
                    checkpoint=checkpoint,
                    seed=self.seed,
                    progress=self.progress,
                    normalisation=self.normalisation,
                )
            fit_seconds = fitted.seconds
            if self.calibration is not None and type(method) is not MAP:
                begun = time.monotonic()
                bnn.calibrate(self.calibration.loader, draws=self._draws(method), seed=self.seed)
                calibrate_seconds = time.monotonic() - begun
        save(bnn, folder)
        record = {
            "fit": None if fitted is None else str(fitted),
            "fit_seconds": fit_seconds,
            "calibrate_seconds": calibrate_seconds,
            "bytes": sum(path.stat().st_size for path in folder.iterdir()),
            "files": identify_files(folder),
        }
        write_json(self.cache / f"fit-{made_from}.json", record)
        remove_checkpoint(checkpoint)
        return bnn, record

    def _is_ready(self, method: Method) -> bool:
        """Whether there is nothing to fit: the network itself, if its likelihood learns nothing."""
        return type(method) is MAP and not list(self.likelihood.parameters())

    def _draws(self, method: Method) -> int:
        if self.draws is None or isinstance(method, MAP):
            return method.draws
        components = method.components
        return max(1, round(self.draws / components)) * components

    def judge(self, bnn: BayesianModel) -> dict[str, Any]:
        """Goes through every set once, and measures."""
        draws = self._draws(bnn.method)

        def ask(data: DataSet, *, targets: bool) -> answers.Answers:
            # Resamples are of the same examples for all methods: their order must be one.
            with seeded(key("compare", self.seed), data.loader):
                return answers.ask(
                    bnn,
                    data.loader,
                    data.name,
                    targets=targets,
                    draws=draws,
                    seed=self.seed,
                    normalisation=self.normalisation,
                )

        test = ask(self.test, targets=True)
        ood = {name: ask(other, targets=False) for name, other in self.ood.items()}
        each = math.ceil(answers.SHOWN / max(1, len(ood)))  # some of every set
        strange = [x for one in ood.values() for x in one.pictures.get(STRANGEST, [])[:each]]
        strange.sort(key=lambda shown: -shown["entropy"])
        examples = {**test.pictures, STRANGEST: strange[: answers.SHOWN]}
        told = {
            name: self._measured(answers.detection(test, other), [len(test), len(other)])
            for name, other in ood.items()
        }
        return {
            "noise": bnn.noise,
            "temperature": bnn.temperature,
            "slope": bnn.slope,
            "draws": draws,
            "cost": self._cost(bnn, draws),
            "measures": self._measured(answers.measures(test), [len(test)]),
            "ood": told,
            "curves": {**answers.curves(test, ood), "shift": self._sweep(bnn, draws)},
            "per_class": answers.per_class(test),
            "examples": examples,
            "sizes": {"test": len(test), "ood": {name: len(one) for name, one in ood.items()}},
        }

    def _measured(
        self,
        found: tuple[Mapping[str, float | None], dict[str, bootstrap.Measure]],
        sizes: Sequence[int],
    ) -> dict[str, Any]:
        """Values, and what the resamples say, by which methods are compared later."""
        values, functions = found
        samples = {
            name: [float(f"{sample:.7g}") for sample in each.tolist()]
            for name, each in bootstrap.resample(functions, sizes, seed=self.seed).items()
        }
        return {
            name: {"value": value, "samples": samples.get(name)} for name, value in values.items()
        }

    def _sweep(self, bnn: BayesianModel, draws: int) -> dict[str, Any] | None:
        """Uncertainty as images get worse."""
        if self.shift is None:
            return None
        with seeded(key("compare", self.seed), self.test.loader):
            batches = _first_examples(self.test.loader, SHIFT_EXAMPLES)
        points = sweep(
            bnn, batches, self.shift, normalisation=self.normalisation, draws=draws, seed=self.seed
        )
        names = ("severity", "aleatoric", "epistemic", "accuracy")
        return {
            "kind": self.shift,
            "entropy": [point.uncertainty for point in points],
            **{name: [getattr(point, name) for point in points] for name in names},
        }

    @torch.no_grad()
    def _cost(self, bnn: BayesianModel, draws: int) -> dict[str, Any]:
        """Time and memory of a prediction of one batch; time against the network's own."""
        inputs = self.first[:TIMED_EXAMPLES].to(bnn.device)
        network = self.plain.network

        def predict() -> object:
            return bnn.predict(inputs, draws=draws, seed=self.seed)

        def run() -> object:
            return network(*inputs.args, **inputs.kwargs)

        with PeakMemory() as memory:
            predict()
        run()
        times: dict[Callable[[], object], list[float]] = {predict: [], run: []}
        fewest, most = REPEATS
        started = time.perf_counter()
        while len(times[run]) < fewest or (
            len(times[run]) < most and time.perf_counter() - started < TIMED_SECONDS
        ):
            # Turn about, so that what slows the machine slows both.
            for call, taken in times.items():
                begun = time.perf_counter()
                call()
                if bnn.device.type != "cpu":
                    torch.accelerator.synchronize()
                taken.append(time.perf_counter() - begun)
        ratio = statistics.median(times[predict]) / max(statistics.median(times[run]), 1e-9)
        return {"relative_time": ratio, "peak_bytes": memory.peak}


def _shows_pixels(inputs: Inputs, normalisation: Normalisation | None) -> bool:
    """Whether these are images that can be made worse in pixel units."""
    image = inputs.args[0] if len(inputs.args) == 1 and not inputs.kwargs else None
    if not isinstance(image, Tensor) or image.ndim != 4 or not image.is_floating_point():
        return False
    try:
        Scale(image, normalisation)
    except DataError as error:
        warnings.warn(
            f"no curve of uncertainty against corruption: {error}", BayesifyWarning, stacklevel=4
        )
        return False
    return True


def _first_examples(loader: Iterable[Any], most: int) -> list[Any]:
    """The first batches, cut to `most` examples."""
    batches: list[Any] = []
    for inputs, target in labelled(loader):
        room = most - sum(len(target) for _, target in batches)
        if room <= 0:
            break
        batches.append((inputs[:room].args[0], target[:room]))
    return batches


def _read_record(file: Path) -> dict[str, Any] | None:
    """What an earlier run wrote; None if there is nothing of use."""
    try:
        found = read_json(file)
    except CorruptFileError:
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def _named_warnings(name: str) -> Iterator[None]:
    """Says of bayesify's own warnings which method they are about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BayesifyWarning)
        yield
    for one in caught:
        if issubclass(one.category, BayesifyWarning):
            warnings.warn(f"{name}: {one.message}", BayesifyWarning, stacklevel=4)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
