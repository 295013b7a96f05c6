"""The command line: everything that bayesify does, by name, without writing Python.

Heavy libraries are imported inside the commands, so that asking for help is quick. `options` has
what commands are given, `arguments` reads it, `printing` shows what comes of it.
"""

import codecs
import shlex
import sys
import traceback
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from bayesify import __version__
from bayesify.cli.arguments import (
    check_abstention,
    choose_threshold,
    first,
    named,
    open_loader,
    open_readable,
    read_method,
    read_methods,
    read_normalisation,
    read_where,
)
from bayesify.cli.interrupts import heeded_interrupts
from bayesify.cli.options import (
    DATA,
    Augment,
    BatchSize,
    Calibration,
    Data,
    Draws,
    Epochs,
    Folder,
    Last,
    Likelihood,
    MethodName,
    Model,
    Normalise,
    OtherData,
    Progress,
    Seed,
    Settings,
    Size,
    Validation,
    Weights,
    Where,
)
from bayesify.cli.printing import plain_warnings, print_plan, print_reports, say
from bayesify.errors import BayesifyError


class _Commands(TyperGroup):
    """Turns what can go wrong into one line and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        debug = bool(ctx.params.get("debug"))
        with plain_warnings(), heeded_interrupts():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                say("interrupted")
                raise typer.Exit(130) from None
            except BrokenPipeError:
                raise  # the reader has gone, as in `| head`: Typer ends quietly
            except (BayesifyError, OSError) as error:
                if debug:
                    traceback.print_exc()
                say(f"error: {error}")
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

    chosen = read_where(where, last)
    planned = make_plan(
        load_model(model, weights=weights),
        read_method(method, settings),
        where=chosen,
        example=None if example is None else first(open_readable(example, 1)),
    )
    print_plan(planned)


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
    mirror: Annotated[
        bool | None,
        typer.Option(
            help="Whether mirrored images show the same: then half of the draws may see them so. "
            "By default if --augment crop-flip says it."
        ),
    ] = None,
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
    chosen = read_where(where, last)
    require_free(output)  # before training, not after it
    loader = open_loader(data, batch_size, normalise, size, shuffle=True)
    held = None if validation is None else open_loader(validation, batch_size, normalise, size)
    # Read before training, so that a wrong name does not cost a night.
    spare = None if calibration is None else open_loader(calibration, batch_size, normalise, size)
    strange = None if ood is None else open_loader(ood, batch_size, normalise, size)
    deciding: dict[str, Any] = {}
    if chosen == "auto":
        deciding = {"training": loader} if held is None else {"validation": held}
    bnn = convert(
        load_model(model, weights=weights),
        read_method(method, settings),
        likelihood=likelihood,
        where=chosen,
        example=None if last is None else first(open_readable(data, 1, normalise, size)),
        seed=seed,
        **deciding,
    )
    if bnn.choice is not None:
        typer.echo(f"{bnn.choice}\n")
    kept = checkpoint or output.with_name(f"{output.name}.checkpoint.safetensors")
    if kept.exists():
        say(f"continuing from {kept}")
    try:
        result = bnn.fit(
            loader,
            epochs=epochs,
            validation=held,
            augment=augment,
            ood=strange,
            groups=groups,
            temper=temper,
            mirror=mirror,
            normalisation=read_normalisation(normalise),
            checkpoint=kept,
            seed=seed,
            progress=progress,
            precision=precision,
        )
    except KeyboardInterrupt:
        if kept.exists():
            say(f"progress is in {kept}: run the same command again to go on from there")
        raise
    typer.echo(f"fitted: {result}")
    if spare is None:
        typer.echo("not calibrated: pass --calibration with data that has not been used yet")
    else:
        found = bnn.calibrate(spare, seed=seed)
        typer.echo(
            f"calibrated: noise {found.noise:.3g}, temperature {found.temperature:.3g}, "
            f"slope {found.slope:.3g}, held-out NLL {found.nll:.4f}"
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
    loader = open_readable(data, batch_size, normalise, size)
    others: dict[str, Iterable[Any]] = {
        name: open_readable(spec, batch_size, normalise, size) for name, spec in named(ood or [])
    }
    reports = {
        "network": plain.evaluate(loader, ood=others, seed=seed),
        type(bnn.method).__name__: bnn.evaluate(loader, ood=others, draws=draws, seed=seed),
    }
    print_reports(reports)
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
        methods=read_methods(method, settings),
        validation=validation,
        calibration=calibration,
        ood=dict(named(ood or [])),
        likelihood=likelihood,
        augment=augment,
        epochs=epochs,
        draws=draws,
        seed=seed,
        output=output,
        normalisation=read_normalisation(normalise),
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
    check_abstention(abstain_above, target_risk, validation, confidence)
    normalise = normalise or usual_normalisation(model)
    bnn = load(folder, load_model(model, weights=weights))
    found = load_inputs(data, normalise=read_normalisation(normalise), size=size)
    table = PredictionTable(bnn, abstain_above, draws, seed, tolerance)
    if target_risk is not None and validation is not None:
        labelled = open_readable(validation, batch_size, normalise, size)
        choose_threshold(table, labelled, target_risk, confidence)
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
        say(f"answered {answered:,} of {table.examples:,}, abstained from {table.abstained:,}")


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
