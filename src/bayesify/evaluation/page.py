"""The report: one HTML file that says how far to trust a network, made from `results.json`.

The file needs nothing else: plots are SVG inside it, the script and the style too, and a content
security policy forbids the browser to load or run anything that is not. What came from the user
is escaped, and an image is used only if it is a PNG in a data URI.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from bayesify.evaluation import panels
from bayesify.evaluation.contract import check
from bayesify.evaluation.verdict import duration, judge, size
from bayesify.files import write_bytes

PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}", re.ASCII)
MISTAKES = "mistakes_"
MISSING = "\u2013"  # a dash for what was not measured
HEADINGS = {
    "accuracy": ("accuracy", "↑", "share of right answers"),
    "nll": ("NLL", "↓", "negative log-likelihood, in nats an example"),
    "ece": ("ECE", "↓", "expected calibration error: mean gap of confidence and accuracy"),
    "adaptive_ece": ("adaptive ECE", "↓", "ECE over bins with equally many answers each"),
    "classwise_ece": ("classwise ECE", "↓", "mean over classes of the ECE of their probability"),
    "brier": ("Brier", "↓", "squared error of the probabilities"),
    "brier_reliability": ("reliability", "↓", "part of Brier: probabilities that are not kept"),
    "brier_resolution": ("resolution", "↑", "part of Brier, taken off: how far answers differ"),
    "brier_uncertainty": ("uncertainty", "", "part of Brier: the data's, the same for all"),
    "brier_within": ("within bins", "", "part of Brier: what its bins do not tell apart"),
    "aurc": ("AURC", "↓", "area under the risk-coverage curve"),
    "rmse": ("RMSE", "↓", "root mean squared error, in the target's units"),
    "crps": ("CRPS", "↓", "continuous ranked probability score, in the target's units"),
    "mistakes_auroc": ("AUROC", "↑", "chance that doubt ranks a mistake above a right answer"),
    "mistakes_aupr": ("AUPR", "↑", "area under precision and recall of finding mistakes"),
    "mistakes_fpr95": ("FPR95", "↓", "share of right answers flagged when 95 % of mistakes are"),
    "mistakes_aupr_inside": ("AUPR inside", "↑", "area under both of finding right answers"),
    "auroc": ("AUROC", "↑", "chance that doubt ranks other data above the test set's"),
    "aupr": ("AUPR", "↑", "area under precision and recall of finding other data"),
    "aupr_inside": ("AUPR inside", "↑", "area under both of finding the test set's"),
    "fpr95": ("FPR95", "↓", "share of the test set flagged when 95 % of other data is"),
}
HEADLINE = ("accuracy", "nll", "ece", "brier", "aurc", "rmse", "crps", "auroc")
VISIBLE = 0.005  # nats that a tile, with two decimals, does not show as zero
SMALL = (  # shown to four decimals
    "ece", "adaptive_ece", "classwise_ece", "aurc", "brier_reliability", "brier_within",
)  # fmt: skip
COSTS = {
    "fit_seconds": ("fit", "time to fit and calibrate"),
    "relative_time": ("time", "of a prediction, as a multiple of the network's own"),
    "bytes": ("disk", "bytes on disk"),
    "peak_bytes": ("memory", "peak memory"),
}
MARKS = {
    True: ("better", "▲", "better than the network, beyond noise"),
    False: ("worse", "▼", "worse than the network, beyond noise"),
    None: ("noise", "≈", "no different from the network: within noise"),
}


def write_report(results: Mapping[str, Any], path: str | Path) -> Path:
    """Writes the report of a comparison.

    Args:
        results: What `compare` found, as `results.json` holds it.
        path: Where the HTML file goes.

    Returns:
        The path.

    Raises:
        CorruptFileError: If the results are damaged, incomplete or of a newer bayesify.
    """
    page = render(results)
    path = Path(path)
    write_bytes(path, page.encode())
    return path


def render(results: Mapping[str, Any]) -> str:
    """The report as HTML; see `write_report`."""
    from jinja2 import Environment, StrictUndefined

    results = check(results)
    assets = files("bayesify") / "assets"
    script = (assets / "report.js").read_text("utf-8")
    methods, base = results["methods"], results["baseline"]
    verdict = judge(results)
    others = [name for name in methods if name != base]
    beside = verdict.chosen or (others[0] if others else None)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string((assets / "report.html").read_text("utf-8")).render(
        results=results,
        verdict=verdict,
        tables=_tables(results),
        plots=_plots(results),
        classes=_per_class(results, beside),
        galleries=_galleries(results, beside),
        marks=MARKS,
        style=(assets / "report.css").read_text("utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


# The tables


def _tables(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of quality beside cost, and those of what did not fit into it."""
    methods = results["methods"]
    names = list(dict.fromkeys(name for m in methods.values() for name in m["measures"]))
    strange = [
        (other, name)
        for other in dict.fromkeys(other for m in methods.values() for other in m["ood"])
        for name in ("auroc", "aupr", "aupr_inside", "fpr95")
        if any(name in m["ood"].get(other, {}) for m in methods.values())
    ]
    quality = [(None, name) for name in names if not name.startswith(MISTAKES)]
    mistakes = [(None, name) for name in names if name.startswith(MISTAKES)]
    whole = quality + strange
    first = [column for column in whole if column[1] in HEADINGS and column[1] in HEADLINE]
    tables = [{"columns": _columns(first, costs=True), "rows": _rows(results, first, costs=True)}]
    for part in (quality, mistakes, strange):
        if rest := [column for column in part if column not in first]:
            tables.append({"columns": _columns(rest), "rows": _rows(results, rest)})
    return tables


def _columns(
    columns: list[tuple[str | None, str]], *, costs: bool = False
) -> list[dict[str, str | None]]:
    heads: list[dict[str, str | None]] = []
    for other, name in columns:
        title, arrow, note = HEADINGS.get(name) or _unlisted(name)
        kind = "mistakes" if name.startswith(MISTAKES) else other
        heads.append({"title": title, "arrow": arrow, "note": note, "set": kind})
    if costs:
        heads += [
            {"title": title, "arrow": "↓", "note": note, "set": None}
            for title, note in COSTS.values()
        ]
    return heads


def _unlisted(name: str) -> tuple[str, str, str]:
    """The heading of a measure that is not in `HEADINGS`."""
    if share := re.fullmatch(r"accuracy_at_(\d+)", name):
        return f"at {share[1]} %", "↑", f"accuracy on the surest {share[1]} % of the inputs"
    return name.replace("_", " "), "", ""


def _rows(
    results: Mapping[str, Any], columns: list[tuple[str | None, str]], *, costs: bool = False
) -> list[dict[str, Any]]:
    rows = []
    for key, method in results["methods"].items():
        cells = []
        for other, name in columns:
            source = method["measures"] if other is None else method["ood"].get(other, {})
            cells.append(_cell(name, source.get(name), key == results["baseline"]))
        if costs:
            cells += _costs(method["cost"])
        rows.append({"title": method["title"], "name": key, "cells": cells})
    return rows


def _cell(name: str, measure: Mapping[str, Any] | None, base: bool) -> dict[str, Any]:
    if measure is None or measure["value"] is None:
        return {"text": MISSING, "value": None, "range": None, "mark": None}
    low, high = measure["low"], measure["high"]
    known = low is not None and high is not None
    return {
        "text": _number(name, measure["value"]),
        "value": measure["value"],
        "range": f"{_number(name, low, '')} to {_number(name, high, '')}" if known else None,
        "mark": MARKS[measure["better"]] if known and not base else None,
    }


def _number(name: str, value: float, unit: str = " %") -> str:
    if name.startswith("accuracy"):
        return f"{100 * value:.2f}{unit}"
    if abs(value) >= 100:
        return f"{value:.4g}"
    return f"{value:.4f}" if name in SMALL else f"{value:.3f}"


def _costs(cost: Mapping[str, float | None]) -> list[dict[str, Any]]:
    spent = [cost.get(key) for key in ("fit_seconds", "calibrate_seconds")]
    seconds = None if spent == [None, None] else sum(part or 0 for part in spent)
    shown = (
        (seconds, duration),
        (cost.get("relative_time"), lambda ratio: f"{ratio:.2f} \u00d7"),
        (cost.get("bytes"), size),
        (cost.get("peak_bytes"), size),
    )
    return [
        {"text": MISSING if v is None else show(v), "value": v, "range": None, "mark": None}
        for v, show in shown
    ]


def _per_class(results: Mapping[str, Any], beside: str | None) -> dict[str, Any] | None:
    """Class by class, the network and the method beside it."""
    methods = results["methods"]
    names = [name for name in (results["baseline"], beside) if name]
    found = {name: {row["class"]: row for row in methods[name]["per_class"]} for name in names}
    found = {name: rows for name, rows in found.items() if rows}
    if not found:
        return None
    classes = sorted(set().union(*found.values()))
    return {
        "methods": [methods[name]["title"] for name in found],
        "rows": [
            {
                "class": _label(results, label),
                "examples": next(r[label]["examples"] for r in found.values() if label in r),
                "cells": [cell for rows in found.values() for cell in _of_class(rows.get(label))],
            }
            for label in classes
        ],
    }


def _of_class(row: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    row = row or {"accuracy": None, "confidence": None, "entropy": None}
    right, said = row["accuracy"], row["confidence"]
    gap = None if right is None or said is None else 100 * (said - right)
    return [
        {"value": right, "text": MISSING if right is None else f"{100 * right:.1f}"},
        {"value": gap, "text": MISSING if gap is None else f"{gap:+.1f}"},
        {
            "value": row["entropy"],
            "text": MISSING if row["entropy"] is None else f"{row['entropy']:.3f}",
        },
    ]


# The pictures


def _plots(results: Mapping[str, Any]) -> dict[str, list[Any]]:
    """SVGs by kind of plot; none where nothing was measured."""
    from markupsafe import Markup

    titles = {name: method["title"] for name, method in results["methods"].items()}
    curves = {name: method["curves"] for name, method in results["methods"].items()}
    base = results["baseline"]

    def having(kind: str) -> dict[str, Any]:
        found = {name: curve.get(kind) for name, curve in curves.items()}
        return {name: curve for name, curve in found.items() if curve and _drawable(kind, curve)}

    figures: dict[str, list[tuple[Any, str]]] = {"risk_coverage": [], "shift_accuracy": []}
    bins = having("reliability")
    figures["reliability"] = [
        (
            panels.reliability(titles[name], curve, bins.get(base), place),
            f"Reliability diagram of {titles[name]}",
        )
        for place, (name, curve) in enumerate((n, c) for n, c in bins.items() if n != base)
    ] or [(panels.reliability(titles[base], c), "Reliability diagram") for c in bins.values()]
    doubts = having("entropy")
    top = max(
        (100 * share for c in doubts.values() for kind in _shares(c) for share in kind), default=0
    )
    test = results["data"]["test"]["name"] or "test"
    figures["entropy"] = [
        (
            panels.entropies(titles[name], curve, 1.05 * top or None, test),
            f"Histogram of predictive entropy of {titles[name]}",
        )
        for name, curve in doubts.items()
    ]
    if risks := having("risk_coverage"):
        figures["risk_coverage"] = [
            (
                panels.risk_coverage(_titled(risks, titles)),
                "Mistakes against the share of inputs answered",
            )
        ]
    shifts = having("shift")
    top = max((value for c in shifts.values() for value in c["entropy"]), default=0)
    figures["shift"] = [
        (
            panels.shift_entropy(titles[name], curve, 1.1 * top or None),
            f"Predictive entropy against corruption of {titles[name]}",
        )
        for name, curve in shifts.items()
    ]
    if known := {name: curve for name, curve in shifts.items() if curve["accuracy"]}:
        figures["shift_accuracy"] = [
            (panels.shift_accuracy(_titled(known, titles)), "Accuracy against corruption")
        ]
    return {
        # Our own SVG, in which matplotlib and ElementTree escaped what the user named.
        kind: [
            Markup(panels.to_svg(figure, f"{kind}-{place}", text))  # noqa: S704
            for place, (figure, text) in enumerate(drawn)
        ]
        for kind, drawn in figures.items()
    }


def _drawable(kind: str, curve: Mapping[str, Any]) -> bool:
    """Whether a curve has points, and no holes where there can be none."""
    lists = [values for values in curve.values() if isinstance(values, list)]
    lists += _shares(curve) if kind == "entropy" else []
    holes = any(value is None for values in lists for value in values)
    return any(lists) and (kind == "reliability" or not holes)


def _shares(curve: Mapping[str, Any]) -> list[list[float]]:
    return [curve["test"], *curve["ood"].values()]


def _titled(curves: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, Any]:
    """Curves by title, or by name where two methods have one title."""
    alone = [title for title in titles.values() if list(titles.values()).count(title) == 1]
    return {titles[n] if titles[n] in alone else n: curve for n, curve in curves.items()}


def _galleries(results: Mapping[str, Any], beside: str | None) -> list[dict[str, Any]]:
    base = results["baseline"]
    network = results["methods"][base]
    doubter = _doubter(results, beside)
    wanted = [
        (base, "surest_wrong", "The network is surest of these, and wrong"),
        (beside or base, "surest_wrong", "{} is surest of these, and wrong"),
        *(
            [(doubter, "most_epistemic", "{} doubts itself most here (epistemic)")]
            if doubter
            else []
        ),
        (beside or base, "most_aleatoric", "{} finds these most ambiguous (aleatoric)"),
        (beside or base, "most_uncertain_ood", "{} doubts most among other data"),
    ]
    galleries = []
    for place, (name, kind, title) in enumerate(wanted):
        method = results["methods"][name]
        tiles = method["examples"].get(kind, [])
        if not tiles or (place == 1 and method is network):
            continue
        galleries.append(
            {
                "title": title.format(method["title"] if method is not network else "The network"),
                "tiles": [_tile(results, tile) for tile in tiles],
            }
        )
    return galleries


def _doubter(results: Mapping[str, Any], beside: str | None) -> str | None:
    """The method beside the network if it doubts itself at all, or else the first that does."""
    names = [beside, *results["methods"]] if beside else list(results["methods"])
    for name in names:
        tiles = results["methods"][name]["examples"].get("most_epistemic", [])
        if any((tile["epistemic"] or 0) > VISIBLE for tile in tiles):
            return name
    return None


def _tile(results: Mapping[str, Any], tile: Mapping[str, Any]) -> dict[str, Any]:
    image = tile["image"]
    return {
        **tile,
        "image": image if image and PNG.fullmatch(image) else None,
        "answer": _label(results, tile["label"]),
        "truth": None if tile["target"] is None else _label(results, tile["target"]),
    }


def _label(results: Mapping[str, Any], label: int) -> str:
    names = results["classes"]
    return str(names[label]) if 0 <= label < len(names) else str(label)
