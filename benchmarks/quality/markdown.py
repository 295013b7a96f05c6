"""Numbers of several seeds as Markdown, and where it goes."""

import re
import statistics
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]  # one a seed


def lookup(row: dict[str, Any], key: str) -> float | None:
    """A number by its path, "ood.svhn.auroc"; None if it was not measured."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def spread(rows: Rows, key: str) -> tuple[float, float | None] | None:
    """Mean over seeds and, of several, their standard deviation."""
    values = [value for row in rows if (value := lookup(row, key)) is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def mean(rows: Rows, key: str) -> float | None:
    found = spread(rows, key)
    return None if found is None else found[0]


def cell(rows: Rows, key: str, digits: int) -> str:
    found = spread(rows, key)
    if found is None:
        return "-"
    mean, deviation = found
    more = "" if deviation is None or digits == 0 else f" ± {deviation:.{digits}f}"
    return f"{mean:.{digits}f}{more}"


def markdown(title: str, rows: dict[str, Rows], columns: dict[str, tuple[str, int]]) -> str:
    if not rows:
        return "Not measured yet."
    # A column that nobody has says nothing.
    shown = {
        column: at for column, at in columns.items() if any(spread(r, at[0]) for r in rows.values())
    }
    lines = [f"| {title} | {' | '.join(shown)} |", f"|---|{'---:|' * len(shown)}"]
    for name, each in rows.items():
        cells = [cell(each, key, digits) for key, digits in shown.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: Path, made: dict[str, str]) -> None:
    """Puts each table between its markers.

    Raises:
        ValueError: If the page lacks one.
    """
    text = page.read_text()
    for name, table in made.items():
        start, end = f"<!-- quality:{name} -->", f"<!-- /quality:{name} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no place for {name!r}: write {start} and {end}.")
        before, after = pattern.split(text, maxsplit=1)
        text = f"{before}{start}\n{table}\n{end}{after}"
    page.write_text(text)
