"""What users type, read."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

import typer

from bayesify.cli.printing import say
from bayesify.errors import SettingError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from bayesify.data import Normalisation, Readable
    from bayesify.methods import Method
    from bayesify.table import PredictionTable


def read_method(name: str, settings: list[str] | None) -> "Method":
    """A method from `--method` and `--set`; values are read as the type of the setting."""
    from bayesify.methods import METHODS, make_method

    known = METHODS.get(name)
    types = {field.name: field.type for field in fields(known)} if known else {}
    values: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not (key and equals and text):
            raise typer.BadParameter(f"{setting!r}: write NAME=VALUE.", param_hint="--set")
        values[key] = _read(key, text, types.get(key))
    return make_method(name, values)


def read_methods(names: list[str] | None, settings: list[str] | None) -> "dict[str, Method]":
    """Methods from several `--method`, or the usual ones, and `--set METHOD.NAME=VALUE`."""
    from bayesify.compare import DEFAULT

    chosen: dict[str, list[str]] = {name: [] for name in names or DEFAULT}
    for setting in settings or []:
        name, dot, rest = setting.partition(".")
        if not (dot and name in chosen):
            raise typer.BadParameter(
                f"{setting!r}: write METHOD.NAME=VALUE, of one of {', '.join(chosen)}.",
                param_hint="--set",
            )
        chosen[name].append(rest)
    return {name: read_method(name, values) for name, values in chosen.items()}


def _read(name: str, text: str, kind: Any) -> Any:
    """The value of a setting of that kind; what has another kind is left to the method to say."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    readers: dict[Any, tuple[Callable[[str], Any], str]] = {
        bool: ({"true": True, "false": False}.__getitem__, "true or false"),
        int: (int, "a whole number"),
        float: (float, "a number"),
        tuple[float, float]: (lambda pair: tuple(map(float, pair.split(","))), "two numbers, A,B"),
    }
    for known, (read, wanted) in readers.items():
        if known in kinds:
            try:
                return read(text)
            except (ValueError, KeyError):
                raise SettingError(f"--set {name}={text}: {wanted} is wanted.") from None
    return text


def read_where(globs: list[str] | None, last: int | None) -> str | list[str] | int | None:
    """What `--where` and `--last` say."""
    if globs and last is not None:
        raise typer.BadParameter("give --where or --last, not both.", param_hint="--where")
    if globs == ["auto"]:
        return "auto"
    return last if last is not None else (globs or None)


def read_normalisation(text: str | None) -> "Normalisation | None":
    """Means and standard deviations from `--normalise`."""
    from bayesify.data import CIFAR10_NORMALISATION

    if text is None:
        return None
    if text == "cifar10":
        return CIFAR10_NORMALISATION
    try:
        mean, std = ([float(number) for number in part.split(",")] for part in text.split(";"))
    except ValueError:
        raise SettingError(
            f"--normalise {text!r}: write cifar10, or means and standard deviations as in "
            f"'0.5,0.5,0.5;0.2,0.2,0.2'."
        ) from None
    return mean, std


def named(specs: list[str]) -> Iterator[tuple[str, str]]:
    """`NAME=DATA` or `DATA`, which is then its own name."""
    for spec in specs:
        name, equals, data = spec.partition("=")
        yield (name, data) if equals else (spec, spec)


def open_loader(
    spec: str,
    batch_size: int,
    normalise: str | None = None,
    size: int | None = None,
    *,
    shuffle: bool = False,
) -> "DataLoader[Any]":
    """Batches of data, without images that cannot be read."""
    from torch.utils.data import DataLoader

    from bayesify.data import load_data, readable

    data = readable(load_data(spec, normalise=read_normalisation(normalise), size=size))
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def open_readable(
    spec: str, batch_size: int, normalise: str | None = None, size: int | None = None
) -> "Readable":
    """Batches in order, without images that cannot be read, which show when it comes to them."""
    from bayesify.data import Readable, load_data

    return Readable(load_data(spec, normalise=read_normalisation(normalise), size=size), batch_size)


def check_abstention(
    threshold: float | None, risk: float | None, validation: str | None, confidence: float | None
) -> None:
    """Stops wrong combinations of the options that make `predict` abstain."""
    if threshold is not None and risk is not None:
        raise typer.BadParameter(
            "give it, or --target-risk to choose it, not both.", param_hint="--abstain-above"
        )
    if (risk is None) != (validation is None):
        raise typer.BadParameter(
            "--target-risk and --validation go together: a risk, and labelled data to measure it.",
            param_hint="--target-risk",
        )
    if confidence is not None and risk is None:
        raise typer.BadParameter("it is about --target-risk.", param_hint="--confidence")


def choose_threshold(
    table: "PredictionTable", labelled: "Readable", risk: float, confidence: float | None
) -> None:
    """Makes predictions abstain so that they keep to a risk, and says what that costs."""
    from bayesify.table import learn_threshold

    chosen = learn_threshold(
        table.model,
        labelled,
        risk,
        confidence=confidence,
        draws=table.draws,
        seed=table.seed,
        tolerance=table.tolerance,
    )
    table.threshold = chosen.value
    bound = "" if chosen.bound is None else f" (on new data at most {chosen.bound:.2%})"
    say(
        f"abstaining above {chosen.value!r} nats: of the validation data that answers "
        f"{chosen.coverage:.1%}, and {chosen.risk:.2%} of the answers are wrong{bound}"
    )


def first(loader: Iterable[Any]) -> Any:
    """The inputs of the first batch."""
    return next(iter(loader))[0]
