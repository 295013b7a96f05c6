"""Methods side by side: what `compare` found, as a table, as CSV and for pandas."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

TITLES = {
    "accuracy": "accuracy ↑",
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "adaptive_ece": "adaptive ECE ↓",
    "brier": "Brier ↓",
    "aurc": "AURC ↓",
    "accuracy_at_80": "accuracy at 80 % ↑",
    "accuracy_at_90": "accuracy at 90 % ↑",
    "accuracy_at_95": "accuracy at 95 % ↑",
    "mistakes_auroc": "AUROC of mistakes ↑",
    "rmse": "RMSE ↓",
    "miou": "mean IoU ↑",
    "auroc": "AUROC ↑",
    "aupr": "AUPR ↑",
    "fpr95": "FPR95 ↓",
}
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "fit_seconds": ("fit, s", lambda value: f"{value:.1f}"),
    "calibrate_seconds": ("calibrate, s", lambda value: f"{value:.1f}"),
    "relative_time": ("time / network's", lambda value: f"{value:.1f}"),
    "bytes": ("on disk, MB", lambda value: f"{value / 1e6:.3g}"),
    "peak_bytes": ("peak memory, MB", lambda value: f"{value / 1e6:.3g}"),
}
SHOWN = (  # in a table that is long enough
    "accuracy", "nll", "ece", "brier", "aurc", "accuracy_at_90", "rmse", "auroc", "fpr95",
)  # fmt: skip
MARKS = {True: "▲", False: "▼", None: "≈"}
LEGEND = (
    "▲ better and ▼ worse than {}, ≈ no different within noise.{}\n"
    "Arrows: which way is better. Time and memory: of one prediction of one batch. More measures: "
    "results.csv."
)
INTERVALS = " Below a value: its 95 % interval, by the bootstrap over examples."
WIDTH = 24  # of a column in a text that no terminal sets a width for


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Args:
        results: What results.json holds.
        folder: Where the files are; None if none were asked for.
    """

    results: Mapping[str, Any]
    folder: Path | None = field(default=None)

    @property
    def methods(self) -> Mapping[str, Any]:
        """What was found of each method, the baseline first."""
        found: Mapping[str, Any] = self.results["methods"]
        return found

    def table(self, *, intervals: bool = True) -> "Table":
        """A rich table, a column a method: how good it is, and what it costs.

        Args:
            intervals: Whether to show the 95 % interval below each value, which takes room.
        """
        from rich.markup import escape
        from rich.table import Table

        test, baseline = self.results["data"]["test"], self.results["baseline"]
        table = Table(
            title=f"{escape(test['name'])}: {test['examples']:,} examples",
            caption=LEGEND.format(
                escape(self.methods[baseline]["title"]), INTERVALS if intervals else ""
            ),
        )
        table.add_column("")
        for method in self.methods.values():
            table.add_column(escape(method["title"]), justify="right")
        for title, cells in self._measures():
            shown = (_cell(cell, name == baseline, intervals) for name, cell in cells.items())
            table.add_row(escape(title), *shown)
        table.add_section()
        for cost, (title, show) in COSTS.items():
            spent = [method["cost"].get(cost) for method in self.methods.values()]
            table.add_row(title, *("-" if value is None else show(value) for value in spent))
        return table

    def rows(self) -> list[dict[str, Any]]:
        """A row a method: its costs, and every measure with its interval."""
        rows = []
        for name, method in self.methods.items():
            row = {"method": name, "title": method["title"], "draws": method["draws"]}
            row |= {name: method[name] for name in ("noise", "temperature", "slope")}
            row |= method["cost"]
            for prefix, found in {"": method["measures"], **method["ood"]}.items():
                for measure, cell in found.items():
                    column = f"{prefix} {measure}".strip()
                    row[column] = cell["value"]
                    row |= {f"{column} {end}": cell[end] for end in ("low", "high", "better")}
            rows.append(row)
        return rows

    def csv(self) -> str:
        """`rows` as CSV."""
        rows = self.rows()
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_pandas(self) -> "pd.DataFrame":
        """`rows` by the method's name.

        Raises:
            MissingExtraError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas() needs pandas: pip install 'bayesify[pandas]'."
            ) from error
        return pd.DataFrame(self.rows()).set_index("method")

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        width = WIDTH * (1 + len(self.methods))
        Console(file=text, width=width, color_system=None).print(self.table())
        return text.getvalue().rstrip("\n")

    def _measures(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Titles, and what each method has under them."""
        first = next(iter(self.methods.values()))
        for measure in filter(SHOWN.__contains__, first["measures"]):
            cells = {name: method["measures"][measure] for name, method in self.methods.items()}
            yield TITLES[measure], cells
        for other, found in first["ood"].items():
            for measure in filter(SHOWN.__contains__, found):
                cells = {name: m["ood"][other][measure] for name, m in self.methods.items()}
                yield f"{other}: {TITLES[measure]}", cells


def _cell(cell: Mapping[str, Any], is_baseline: bool, intervals: bool) -> str:
    value, low, high = (f"{cell[name]:.4f}" for name in ("value", "low", "high"))
    mark = "" if is_baseline else f" {MARKS[cell['better']]}"
    style = {True: "green", False: "red", None: "dim"}[cell["better"]]
    shown = f"{value}{mark}" if is_baseline else f"[{style}]{value}{mark}[/]"
    return f"{shown}\n[dim]{low} to {high}[/]" if intervals else shown
