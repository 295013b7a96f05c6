"""Plots from the JSON files alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quality.settings import CORRUPTIONS, METHODS
from benchmarks.quality.tables import Records, of

NETWORK = "cifar10-resnet20"
Curve = tuple[list[float], list[float]]
Panel = tuple[str, str, Callable[[Records, str], Curve | None]]  # x, y, the curve of a method


def draw(records: Records, folder: Path) -> dict[str, str]:
    """Draws what was measured, and returns what each file shows."""
    severities = [
        (f"severity: {kind}", "entropy, nats", _by_severity(kind)) for kind in CORRUPTIONS
    ]
    made: dict[str, tuple[str, list[Panel]]] = {
        "quality-corruption.png": ("Entropy against corruption", severities),
        "quality-draws.png": ("NLL against the number of draws", [("draws", "NLL", by_draws)]),
    }
    drawn = {}
    for name, (title, panels) in made.items():
        curves = [
            {m: found for m in METHODS if (found := curve(records, m))} for _, _, curve in panels
        ]
        if any(curves):
            _plot([(x, y) for x, y, _ in panels], curves, folder / name)
            drawn[name] = title
    return drawn


def by_draws(records: Records, method: str) -> Curve | None:
    for found in of(records, NETWORK, method, "draws").values():
        points = sorted((int(count), row["nll"]) for count, row in found.items())
        return [float(count) for count, _ in points], [nll for _, nll in points]
    return None


def _by_severity(kind: str) -> Callable[[Records, str], Curve | None]:
    def curve(records: Records, method: str) -> Curve | None:
        for found in of(records, NETWORK, method, "corruption").values():
            points = found[kind]
            return [p["severity"] for p in points], [p["uncertainty"] for p in points]
        return None

    return curve


def _plot(axes: list[tuple[str, str]], curves: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(axes), 3.5), layout="constrained")
    for (x, y), lines, panel in zip(
        axes, curves, figure.subplots(1, len(axes), squeeze=False)[0], strict=True
    ):
        for method, (across, up) in lines.items():
            panel.plot(across, up, marker=".", label=method)
        panel.set(xlabel=x, ylabel=y)
        if x == "draws":
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
    panel.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Software": None})
