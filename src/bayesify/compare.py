"""compare: several methods on a user's own network and data, one after another.

A second run does only what changed, and a run that was interrupted goes on where it was.
"""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayesify.augmentation import Augment, as_augment
from bayesify.batches import is_loader
from bayesify.errors import SettingError
from bayesify.evaluation import bootstrap
from bayesify.evaluation.answers import HIGHER_IS_BETTER
from bayesify.evaluation.comparison import Comparison
from bayesify.evaluation.shifts import SHIFTS
from bayesify.files import write_bytes, write_json
from bayesify.identity import identify_data
from bayesify.likelihood import Likelihood, as_likelihood
from bayesify.methods import MAP, METHODS, Method, make_method, method_name
from bayesify.outliers import Normalisation
from bayesify.trials import DataSet, Trials

TAKEN = ("cache", "results.json", "results.csv", "report.html")
DEFAULT = ("map", "temperature", "abnn", "bayes-adapter", "ibnn", "mc-dropout")
BATCH = 256  # of sets that are named, where nothing is trained

Data = str | Iterable[Any]
Methods = Mapping[str, Method] | Sequence[str | Method]


def compare(
    model: nn.Module,
    data: Data,
    *,
    test: Data,
    methods: Methods | None = None,
    validation: Data | None = None,
    calibration: Data | None = None,
    ood: Mapping[str, Data] | None = None,
    likelihood: str | Likelihood = "classification",
    augment: str | Augment | None = None,
    epochs: int | None = None,
    draws: int | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    classes: Sequence[str] | None = None,
    normalisation: Normalisation | None = None,
    shift: str | None = "gaussian",
    batch_size: int = 64,
    size: int | None = None,
    leave_out: bool | None = None,
    command: str | None = None,
    progress: bool = True,
) -> Comparison:
    """Fits, calibrates and measures several methods on one network, beside the network itself.

    Sets are loaders that can be gone through again and again, or names (see `load_data`). Of image
    files by name, those that cannot be read are listed in a warning and left out.

    Args:
        model: A trained network. It is left as it is.
        data: What is trained on.
        test: What judges, with targets.
        methods: Names, methods, or methods by a name of yours. By default the network, temperature,
            ABNN, BayesAdapter, iBNN and MC dropout, as far as they go with the network and data.
            The network itself (`MAP`) is always among them: the others are compared with it.
        validation: Decides what a fit keeps; split off the data otherwise.
        calibration: Chooses noise and temperature of all but the network itself.
        ood: Sets of other kinds by name, which uncertainty should tell apart from the test set.
        likelihood: "classification", "binary", "multilabel", "regression", or a `Likelihood`.
        augment: "crop-flip", "strong", or a function of a batch of inputs.
        epochs: Passes over the data, by default each method's own number.
        draws: Draws of a prediction, brought to the nearest number that a method can; by default
            each method's own.
        seed: One seed, one result.
        output: A folder for results.json, results.csv, report.html, a folder for each method that
            `load` takes, and what a second run needs.
        classes: Names of the classes, by default those of the test set.
        normalisation: Mean and standard deviation of each channel by which images were normalised.
        shift: How images get worse for the curve of uncertainty against severity, on the first 500
            test images: one of `SHIFTS`, or None.
        batch_size: Of training, for data given by name.
        size: Side to which image files are cut and resized, for data given by name.
        leave_out: Leaves out methods that do not go with network or data, with a warning, instead
            of stopping; so by default where no methods are named.
        command: What results.json says it was made by.
        progress: Shows progress.

    Raises:
        SettingError: If a setting or a method is not known, or a set can be gone through only once.
        DataError: If data cannot be used.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(40, 2)
        >>> loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=10)
        >>> found = compare(network, loader, test=loader, validation=loader,
        ...                 methods=["temperature"], progress=False)
        >>> list(found.methods)
        ['map', 'temperature']
    """
    chosen, baseline = _methods(DEFAULT if methods is None else methods)
    if shift is not None and shift not in SHIFTS:
        raise SettingError(f"shift={shift!r} must be None or one of {', '.join(SHIFTS)}.")
    as_augment(augment)

    def read(given: Data, name: str, batch: int = BATCH, *, shuffle: bool = False) -> DataSet:
        return _read(given, name, normalisation, size, batch, shuffle=shuffle)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if output is None else output
        work = Trials(
            model=model,
            likelihood=as_likelihood(likelihood),
            train=read(data, "train", batch_size, shuffle=True),
            test=read(test, "test"),
            validation=None if validation is None else read(validation, "validation"),
            calibration=None if calibration is None else read(calibration, "calibration"),
            ood={name: read(other, name) for name, other in (ood or {}).items()},
            augment=augment,
            epochs=epochs,
            draws=draws,
            seed=seed,
            normalisation=normalisation,
            shift=shift,
            folder=Path(folder),
            progress=progress,
        )
        records, left_out = work.run(
            chosen, baseline, optional=methods is None if leave_out is None else leave_out
        )
        results = {
            **work.describe(command, classes),
            "baseline": baseline,
            "methods": _assemble(records, baseline),
            "left_out": left_out,
        }
        found = Comparison(results, None if output is None else Path(output))
        if output is not None:
            _write(found, Path(output))
    return found


# What users pass


def _methods(given: Methods) -> tuple[dict[str, Method], str]:
    """Methods by name, the network itself first, and its name."""
    found: dict[str, Method] = {}
    named = given.items() if isinstance(given, Mapping) else [(None, one) for one in given]
    for name, one in named:
        method = make_method(one, {}) if isinstance(one, str) else one
        if type(method) not in METHODS.values():
            raise SettingError(
                f"methods: {method!r} is neither the name of a method nor one of bayesify's. Use "
                f"one of {', '.join(METHODS)}."
            )
        found[name or _free(method_name(method), found)] = method
    for name in found:
        if not re.fullmatch(r"\w[\w .+=-]*", name) or name.lower() in TAKEN:
            raise SettingError(
                f"methods: {name!r} cannot name a folder. Use letters, digits, spaces and . + = -"
            )
    plain = next((name for name, method in found.items() if type(method) is MAP), None)
    if plain is None:
        plain = "map"
        if plain in found:
            raise SettingError(
                "methods: 'map' is the network itself; name the other one otherwise."
            )
        found[plain] = MAP()
    return {plain: found.pop(plain), **found}, plain


def _free(name: str, taken: Mapping[str, Any]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _read(
    given: Data,
    name: str,
    normalisation: Normalisation | None,
    size: int | None,
    batch: int,
    *,
    shuffle: bool,
) -> DataSet:
    from torch.utils.data import DataLoader

    from bayesify.data import load_data, readable

    if isinstance(given, str):
        data = readable(load_data(given, normalise=normalisation, size=size))
        loader: Iterable[Any] = DataLoader(data, batch_size=batch, shuffle=shuffle)
        name = name if name not in ("train", "test", "validation", "calibration") else given
    elif not is_loader(given) or iter(given) is given:
        raise SettingError(
            f"{name}: every method goes through the data, and a {type(given).__name__} cannot be "
            f"gone through again and again. Pass a DataLoader, a list of batches or a name."
        )
    else:
        loader = given
    return DataSet(name, loader, identify_data(loader))


# What is written


def _assemble(records: Mapping[str, Any], baseline: str) -> dict[str, Any]:
    """The methods as results.json has them: intervals, and what is better than the baseline."""
    order = ("title", "settings", "noise", "temperature", "slope", "draws", "fit", "cost")
    base, found = records[baseline], {}
    for name, record in records.items():
        entry = {key: record.get(key) for key in order}  # kept before slopes: without one
        entry["measures"] = _intervals(record["measures"], base["measures"])
        entry["ood"] = {
            other: _intervals(cells, base["ood"][other]) for other, cells in record["ood"].items()
        }
        found[name] = entry | {key: record[key] for key in ("curves", "per_class", "examples")}
    return found


def _intervals(cells: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, cell in cells.items():
        if cell["samples"] is None:
            found[name] = {"value": cell["value"], "low": None, "high": None, "better": None}
            continue
        samples = torch.tensor(cell["samples"], dtype=torch.float64)
        others = torch.tensor(base[name]["samples"], dtype=torch.float64)
        low, high = bootstrap.interval(samples)
        sign = bootstrap.differs(samples, others)
        up = name.startswith(HIGHER_IS_BETTER)
        # A calibration error is larger on resamples than on the set: its interval may miss it.
        found[name] = {
            "value": cell["value"],
            "low": min(low, cell["value"]),
            "high": max(high, cell["value"]),
            "better": None if sign == 0 else (sign > 0) == up,
        }
    return found


def _write(found: Comparison, folder: Path) -> None:
    from bayesify.evaluation.page import write_report

    write_json(folder / "results.json", found.results)
    write_bytes(folder / "results.csv", found.csv().encode())
    write_report(found.results, folder / "report.html")
