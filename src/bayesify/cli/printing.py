"""What users see."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bayesify.errors import BayesifyWarning

if TYPE_CHECKING:
    from bayesify.evaluation.report import Report
    from bayesify.plan import Plan

REPORTED = (
    "accuracy", "nll", "ece", "adaptive_ece", "brier", "aurc", "mistakes_auroc", "rmse", "miou",
)  # fmt: skip


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows bayesify's own warnings as one line each, whatever the filters say."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", BayesifyWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, BayesifyWarning):
                say(f"warning: {message}")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def say(line: str) -> None:
    """A line on stderr, so that what commands print can be piped."""
    typer.echo(line, err=True)


def print_plan(planned: "Plan") -> None:
    """The sites as a table, and what is to be known of them."""
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


def print_reports(reports: "Mapping[str, Report]") -> None:
    """A column for each report."""
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
