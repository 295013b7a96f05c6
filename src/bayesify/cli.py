"""The command line: everything that bayesify does, by name, without writing Python.

Heavy libraries are imported inside the commands, so that asking for help is quick.
"""

import codecs
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from math import prod
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from bayesify import __version__
from bayesify.errors import BayesifyError, BayesifyWarning, SettingError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from bayesify.data import Normalisation, Readable
    from bayesify.evaluation.report import Report
    from bayesify.methods import Method
    from bayesify.plan import Plan
    from bayesify.table import PredictionTable

MODELS = (
    "A network: digits, cifar10-resnet20, cifar10-resnet56; or one of yours: path/to/file.py:build "
    "or package.module:build, where build() returns it."
)
DATA = (
    "Data: file.npz (arrays x and y), file.npz:train (x_train and y_train), file.csv (numbers, the "
    "target's column headed y), a folder of images with one folder a class, or a name such as "
    "digits:test. May end in a slice: digits:test[:100]."
)
REPORTED = (
    "accuracy", "nll", "ece", "adaptive_ece", "brier", "aurc", "mistakes_auroc", "rmse", "miou",
)  # fmt: skip


class _Commands(TyperGroup):
    """Turns what can go wrong into one line and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        debug = bool(ctx.params.get("debug"))
        with _plain_warnings():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                _say("interrupted")
                raise typer.Exit(130) from None
            except BrokenPipeError:
                raise  # the reader has gone, as in `| head`: Typer ends quietly
            except (BayesifyError, OSError) as error:
                if debug:
                    traceback.print_exc()
                _say(f"error: {error}")
                raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="[bold]A worked example[/bold], with what is built in:\n\n"
    "bayesify plan digits\n\n"
    "bayesify fit digits digits:train --validation 'digits:validation[:135]' --calibration "
    "'digits:validation[135:]' --set lr=3e-4 --output digits-abnn\n\n"
    "bayesify evaluate digits-abnn digits digits:test --ood digits-photos\n\n"
    "bayesify predict digits-abnn digits digits:test --output predictions.csv\n\n"
    "Exit codes: 0 done, warnings or not, 1 an error, 2 wrong usage, 130 interrupted.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS)]
Data = Annotated[str, typer.Argument(metavar="DATA", help=DATA)]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="What `bayesify fit` wrote.")]
Weights = Annotated[
    Path | None,
    typer.Option(help="The network's weights, .safetensors. Built-in networks have their own."),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        help="What becomes random: abnn, bayes-adapter, ibnn, mixture; or a baseline: map, "
        "temperature, mc-dropout, deep-ensemble, swag, laplace, test-time-augmentation, "
        "mean-field-vi.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting of the method: --set members=4. Repeatable."
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Only sites whose name matches: 'layer3.*'. Repeatable. Where there is data, auto: "
        "the fewest late layers that do as well on held-out data as any.",
    ),
]
Last = Annotated[int | None, typer.Option(metavar="K", help="Only the last K sites.")]
Validation = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="Decides what is kept; split off the data otherwise."),
]
Calibration = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="Chooses noise and temperature. Data not yet used."),
]
OtherData = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]DATA",
        help="Data of another kind, which doubt should tell apart. Repeatable.",
    ),
]
Likelihood = Annotated[str, typer.Option(help="classification, binary, multilabel or regression.")]
Epochs = Annotated[
    int | None,
    typer.Option(min=1, help="Passes over the data; by default the method's own number."),
]
Augment = Annotated[str | None, typer.Option(help="crop-flip or strong; images only.")]
Progress = Annotated[bool, typer.Option(help="Show progress.")]
Normalise = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN;STD",
        help="How the network's images were normalised; built-in networks have their own. "
        "cifar10, or mean and standard deviation of "
        "each channel in units of 0 to 1, as in '0.5,0.5,0.5;0.2,0.2,0.2'.",
    ),
]
Size = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Cut and resize the images of a folder.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples at a time.")]
Draws = Annotated[int | None, typer.Option(help="Draws of a prediction; as fitted by default.")]
Seed = Annotated[int, typer.Option(help="One seed, one result.")]


def main() -> None:
    """Runs the command line."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bayesify {__version__}")
        raise typer.Exit


@app.callback()
def _bayesify(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Say which.")
    ] = False,
) -> None:
    """Make a trained PyTorch network Bayesian, without retraining it."""


@app.command()
def demo(
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="Folder for report and results.")] = Path(
        "bayesify-demo"
    ),
    progress: Progress = True,
) -> None:
    """Make a small digits network Bayesian in three ways, and report, in under two minutes."""
    from bayesify.demo import run

    run(output, seed, Console(), progress=progress)


@app.command(epilog="Example: bayesify plan digits --set members=4 --last 2")
def plan(
    model: Model,
    weights: Weights = None,
    method: MethodName = "abnn",
    settings: Settings = None,
    where: Where = None,
    last: Last = None,
    example: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Run the network once on the first of these, so that --last counts layers in the "
            "order they run. Without, in the order they are registered.",
        ),
    ] = None,
) -> None:
    """Show what would become random and what it would cost, without doing it."""
    from bayesify.plan import plan as make_plan
    from bayesify.zoo import load_model

    chosen = _where(where, last)
    planned = make_plan(
        load_model(model, weights=weights),
        _method(method, settings),
        where=chosen,
        example=None if example is None else _first(_readable(example, 1)),
    )
    _print_plan(planned)


@app.command(
    epilog="Example: bayesify fit digits digits:train --validation 'digits:validation[:135]' "
    "--calibration 'digits:validation[135:]' --set lr=3e-4 --output digits-abnn"
)
def fit(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to save the result.")],
    weights: Weights = None,
    validation: Validation = None,
    calibration: Calibration = None,
    method: MethodName = "abnn",
    settings: Settings = None,
    where: Where = None,
    last: Last = None,
    likelihood: Likelihood = "classification",
    epochs: Epochs = None,
    batch_size: BatchSize = 64,
    augment: Augment = None,
    ood: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Other data to learn doubt from: bayes-adapter only."),
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Draws a batch; the method chooses otherwise.")
    ] = None,
    temper: Annotated[
        bool, typer.Option(help="End with the temperature that held-out data asks for.")
    ] = True,
    normalise: Normalise = None,
    size: Size = None,
    seed: Seed = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where progress is kept, FOLDER.checkpoint.safetensors by default. After an "
            "interruption the same command goes on from there; it is deleted at the end.",
        ),
    ] = None,
    progress: Progress = True,
    precision: Annotated[str | None, typer.Option(help="bf16 or fp16: mixed precision.")] = None,
) -> None:
    """Make a network Bayesian: convert, fit, calibrate and save it.

    A run that was killed goes on where it was if you run the same command again.
    """
    from bayesify.io import require_free
    from bayesify.mixing import remove_checkpoint
    from bayesify.model import convert
    from bayesify.zoo import load_model, usual_normalisation

    normalise = normalise or usual_normalisation(model)
    chosen = _where(where, last)
    require_free(output)  # before training, not after it
    loader = _loader(data, batch_size, normalise, size, shuffle=True)
    held = None if validation is None else _loader(validation, batch_size, normalise, size)
    # Read before training, so that a wrong name does not cost a night.
    spare = None if calibration is None else _loader(calibration, batch_size, normalise, size)
    strange = None if ood is None else _loader(ood, batch_size, normalise, size)
    deciding: dict[str, Any] = {}
    if chosen == "auto":
        deciding = {"training": loader} if held is None else {"validation": held}
    bnn = convert(
        load_model(model, weights=weights),
        _method(method, settings),
        likelihood=likelihood,
        where=chosen,
        example=None if last is None else _first(_readable(data, 1, normalise, size)),
        seed=seed,
        **deciding,
    )
    if bnn.choice is not None:
        typer.echo(f"{bnn.choice}\n")
    kept = checkpoint or output.with_name(f"{output.name}.checkpoint.safetensors")
    if kept.exists():
        _say(f"continuing from {kept}")
    try:
        result = bnn.fit(
            loader,
            epochs=epochs,
            validation=held,
            augment=augment,
            ood=strange,
            groups=groups,
            temper=temper,
            normalisation=_normalisation(normalise),
            checkpoint=kept,
            seed=seed,
            progress=progress,
            precision=precision,
        )
    except KeyboardInterrupt:
        if kept.exists():
            _say(f"progress is in {kept}: run the same command again to go on from there")
        raise
    typer.echo(f"fitted: {result}")
    if spare is None:
        typer.echo("not calibrated: pass --calibration with data that has not been used yet")
    else:
        found = bnn.calibrate(spare, seed=seed)
        typer.echo(
            f"calibrated: noise {found.noise:.3g}, temperature {found.temperature:.3g}, "
            f"held-out NLL {found.nll:.4f}"
        )
    bnn.save(output)
    remove_checkpoint(kept)
    extra = f" --normalise '{normalise}'" if normalise else ""
    typer.echo(f"saved to {output}; judge it with: bayesify evaluate {output} {model} DATA{extra}")


@app.command(epilog="Example: bayesify evaluate digits-abnn digits digits:test --ood digits-photos")
def evaluate(
    folder: Folder,
    model: Model,
    data: Data,
    weights: Weights = None,
    ood: OtherData = None,
    draws: Draws = None,
    seed: Seed = 0,
    batch_size: BatchSize = 256,
    normalise: Normalise = None,
    size: Size = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "--json", metavar="FILE", help="Write the numbers here, as JSON."),
    ] = None,
) -> None:
    """Measure accuracy, calibration and the detection of other data, beside the network itself.

    AURC is the mean share of mistakes over all shares of answers, the surest first; AUROC of
    mistakes is the chance that a wrong answer is more uncertain than a right one.
    """
    from bayesify.files import write_json
    from bayesify.io import load
    from bayesify.methods import MAP
    from bayesify.model import convert
    from bayesify.zoo import load_model, usual_normalisation

    normalise = normalise or usual_normalisation(model)
    network = load_model(model, weights=weights)
    bnn = load(folder, network)
    plain = convert(network, MAP(), likelihood=bnn.likelihood)
    loader = _readable(data, batch_size, normalise, size)
    others: dict[str, Iterable[Any]] = {
        name: _readable(spec, batch_size, normalise, size) for name, spec in _named(ood or [])
    }
    reports = {
        "network": plain.evaluate(loader, ood=others, seed=seed),
        type(bnn.method).__name__: bnn.evaluate(loader, ood=others, draws=draws, seed=seed),
    }
    _print_reports(reports)
    if output is not None:
        write_json(output, {name: report.to_dict() for name, report in reports.items()})


@app.command(
    epilog="Example: bayesify compare digits digits:train --test digits:test "
    "--validation 'digits:validation[:135]' --calibration 'digits:validation[135:]' "
    "--ood photos=digits-photos --set abnn.lr=3e-4"
)
def compare(
    model: Model,
    train: Annotated[str, typer.Argument(metavar="TRAIN", help=DATA)],
    test: Annotated[str, typer.Option(metavar="DATA", help="What judges. Data not yet used.")],
    weights: Weights = None,
    validation: Validation = None,
    calibration: Calibration = None,
    ood: OtherData = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="A method to compare; see `fit`. Repeatable. By default those of the papers and "
            "the baselines that cost little. The network itself is always among them.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.NAME=VALUE",
            help="A setting of a method: --set abnn.members=4. Repeatable.",
        ),
    ] = None,
    likelihood: Likelihood = "classification",
    epochs: Epochs = None,
    batch_size: BatchSize = 64,
    augment: Augment = None,
    draws: Draws = None,
    shift: Annotated[
        str,
        typer.Option(
            help="How test images get worse: gaussian, salt-and-pepper, blur, contrast, rotation, "
            "jpeg; or none."
        ),
    ] = "gaussian",
    normalise: Normalise = None,
    size: Size = None,
    seed: Seed = 0,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where results, report and methods go.")
    ] = Path("bayesify-compare"),
    progress: Progress = True,
) -> None:
    """Fit, calibrate and measure several methods beside the network itself.

    Run it again after a change or an interruption: what is done already is not done again.
    """
    from bayesify.compare import compare as run
    from bayesify.zoo import load_model, usual_normalisation

    normalise = normalise or usual_normalisation(model)
    found = run(
        load_model(model, weights=weights),
        train,
        test=test,
        methods=_methods(method, settings),
        validation=validation,
        calibration=calibration,
        ood=dict(_named(ood or [])),
        likelihood=likelihood,
        augment=augment,
        epochs=epochs,
        draws=draws,
        seed=seed,
        output=output,
        normalisation=_normalisation(normalise),
        shift=None if shift == "none" else shift,
        batch_size=batch_size,
        size=size,
        leave_out=not method,
        command=shlex.join(["bayesify", *sys.argv[1:]]),
        progress=progress,
    )
    Console().print(found.table())
    typer.echo(
        f"wrote report.html, results.json, results.csv and a folder for each method to {output}"
    )


@app.command(
    epilog="Example: bayesify predict digits-abnn digits digits:test --output out.csv "
    "--target-risk 0.01 --validation digits:validation"
)
def predict(
    folder: Folder,
    model: Model,
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help=f"{DATA} Images by name too: a.png b.png."),
    ],
    weights: Weights = None,
    output: Annotated[
        str,
        typer.Option(metavar="FILE", help=".csv, or .jsonl for JSON lines; - prints a CSV."),
    ] = "-",
    abstain_above: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="T", help="Give no answer where entropy (regression: std) is above T."
        ),
    ] = None,
    target_risk: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="R",
            help="Choose T so that at most this share of the answers on --validation is wrong.",
        ),
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="With labels, for --target-risk. Data not yet used."),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="C",
            help="How surely --target-risk must hold on new data: 0.95. It costs answers; without "
            "it the risk is as likely as not to be a little above.",
        ),
    ] = None,
    draws: Draws = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="Let easy examples stop before all draws, where probabilities are within E of "
            "what these would give (regression: E standard deviations): 0.02.",
        ),
    ] = None,
    seed: Seed = 0,
    batch_size: BatchSize = 256,
    normalise: Normalise = None,
    size: Size = None,
) -> None:
    """Predict into a table: label, confidence, uncertainties in nats, every class's probability.

    entropy = aleatoric + epistemic: the doubt that lies in the data, and the network's own. Rows
    are written as they come; images that cannot be read are left out, and listed at the end.
    """
    from bayesify.data import Readable, load_inputs
    from bayesify.files import replaced_file
    from bayesify.io import load
    from bayesify.table import WRITERS, PredictionTable
    from bayesify.zoo import load_model, usual_normalisation

    write = WRITERS.get(".csv" if output == "-" else Path(output).suffix.lower())
    if write is None:
        raise typer.BadParameter(
            f"{output!r}: name it .csv, or .jsonl for JSON lines.", param_hint="--output"
        )
    _check_abstention(abstain_above, target_risk, validation, confidence)
    normalise = normalise or usual_normalisation(model)
    bnn = load(folder, load_model(model, weights=weights))
    found = load_inputs(data, normalise=_normalisation(normalise), size=size)
    table = PredictionTable(bnn, abstain_above, draws, seed, tolerance)
    if target_risk is not None and validation is not None:
        labelled = _readable(validation, batch_size, normalise, size)
        _choose_threshold(table, labelled, target_risk, confidence)
    rows = chain.from_iterable(
        table.rows(Readable(items, batch_size), name if len(data) > 1 else None)
        for name, items in found
    )
    if output == "-":
        write(rows, sys.stdout)
    else:
        with replaced_file(Path(output)) as file:
            write(rows, codecs.getwriter("utf-8")(file))
        typer.echo(f"wrote {output}")
    if table.threshold is not None:
        answered = table.examples - table.abstained
        _say(f"answered {answered:,} of {table.examples:,}, abstained from {table.abstained:,}")


@app.command(epilog="Example: bayesify report results.json --output report.html")
def report(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS.json", help="What `bayesify compare` wrote.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; report.html beside the results otherwise."),
    ] = None,
) -> None:
    """Make the page of a comparison again: one HTML file that needs nothing else."""
    from bayesify.evaluation.page import write_report
    from bayesify.files import read_json

    path = write_report(read_json(results), output or results.with_name("report.html"))
    typer.echo(f"wrote {path}")


# What users type, read


def _method(name: str, settings: list[str] | None) -> "Method":
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


def _methods(names: list[str] | None, settings: list[str] | None) -> "dict[str, Method]":
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
    return {name: _method(name, values) for name, values in chosen.items()}


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


def _where(globs: list[str] | None, last: int | None) -> str | list[str] | int | None:
    if globs and last is not None:
        raise typer.BadParameter("give --where or --last, not both.", param_hint="--where")
    if globs == ["auto"]:
        return "auto"
    return last if last is not None else (globs or None)


def _normalisation(text: str | None) -> "Normalisation | None":
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


def _named(specs: list[str]) -> Iterator[tuple[str, str]]:
    """`NAME=DATA` or `DATA`, which is then its own name."""
    for spec in specs:
        name, equals, data = spec.partition("=")
        yield (name, data) if equals else (spec, spec)


def _loader(
    spec: str,
    batch_size: int,
    normalise: str | None = None,
    size: int | None = None,
    *,
    shuffle: bool = False,
) -> "DataLoader[Any]":
    from torch.utils.data import DataLoader

    from bayesify.data import load_data, readable

    data = readable(load_data(spec, normalise=_normalisation(normalise), size=size))
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def _readable(
    spec: str, batch_size: int, normalise: str | None = None, size: int | None = None
) -> "Readable":
    """Batches in order, without images that cannot be read, which show when it comes to them."""
    from bayesify.data import Readable, load_data

    return Readable(load_data(spec, normalise=_normalisation(normalise), size=size), batch_size)


def _check_abstention(
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


def _choose_threshold(
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
    _say(
        f"abstaining above {chosen.value!r} nats: of the validation data that answers "
        f"{chosen.coverage:.1%}, and {chosen.risk:.2%} of the answers are wrong{bound}"
    )


def _first(loader: Iterable[Any]) -> Any:
    return next(iter(loader))[0]


# What users see


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows bayesify's own warnings as one line each, whatever the filters say."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", BayesifyWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, BayesifyWarning):
                _say(f"warning: {message}")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _print_plan(planned: "Plan") -> None:
    console = Console()
    console.print(escape(str(planned.method)), highlight=False)
    table = Table()
    for heading in ("site", "layer", "shape", "numbers"):
        table.add_column(heading, justify="right" if heading == "numbers" else "left")
    for site in planned.sites:
        shape = "x".join(map(str, site.shape))
        table.add_row(escape(site.name), escape(site.kind), shape, f"{prod(site.shape):,}")
    console.print(table)
    for name, value in planned.summary().items():
        console.print(f"{name + ':':<16}{value}", highlight=False)
    for skip in planned.skipped:
        line = f"skipped {skip.name} ({skip.kind}): {skip.reason}"
        console.print(escape(line), highlight=False)


def _print_reports(reports: "Mapping[str, Report]") -> None:
    from bayesify.evaluation.comparison import TITLES

    first = next(iter(reports.values()))
    table = Table(
        title=f"{first.examples:,} examples", caption="↑ higher is better, ↓ lower is better"
    )
    table.add_column("")
    for name in reports:
        table.add_column(escape(name), justify="right")
    for measure in REPORTED:
        numbers = [getattr(report, measure) for report in reports.values()]
        if any(number is not None for number in numbers):
            shown = ("-" if number is None else f"{number:.4f}" for number in numbers)
            table.add_row(TITLES[measure], *shown)
    for other in first.ood:
        for measure in ("auroc", "aupr", "fpr95"):
            values = (f"{getattr(report.ood[other], measure):.4f}" for report in reports.values())
            table.add_row(f"{escape(other)}: {TITLES[measure]}", *values)
    Console().print(table)
