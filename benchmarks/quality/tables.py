"""Which tables there are, from the JSON files alone."""

import csv
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesify.evaluation.metrics import aupr
from benchmarks.quality.bars import bars
from benchmarks.quality.markdown import Rows, fill, markdown
from benchmarks.quality.measures import perfect_ece, pooled_ece
from benchmarks.quality.provenance import ROOT
from benchmarks.quality.results import Results
from benchmarks.quality.settings import ABLATIONS, METHODS, OTHERS, PEERS, TRANSFER, Size
from benchmarks.quality.units import ATTACKS, CALIBRATED, Unit, asked, units

DOCS, README = ROOT / "docs" / "results.md", ROOT / "README.md"
NETWORKS = {"cifar10-resnet20": "ResNet-20", "cifar10-resnet56": "ResNet-56"}
Records = dict[Unit, dict[str, Any]]

MEASURES = {  # column: key, digits
    "NLL ↓": ("nll", 4),
    "ECE ↓": ("ece", 4),
    "accuracy ↑": ("accuracy", 4),
    "Brier ↓": ("brier", 4),
    "AUROC, SVHN ↑": ("ood.svhn.auroc", 4),
}
FLOORS = {"ECE if perfect": ("ece_perfect", 4), "ECE, halves pooled ↓": ("ece_pooled", 4)}
DIGEST = {  # what README has
    **{name: MEASURES[name] for name in ("accuracy ↑", "NLL ↓", "ECE ↓", "AUROC, SVHN ↑")},
    "seeds": ("seeds", 0),
}
CALLED = {
    "MAP": "network",
    "Temperature": "temperature scaling",
    "Mirroring": "network, also on the mirror image",
    "Mixture": "`Mixture()` of the three",
}
COSTS = {
    "fit, s": ("fit_seconds", 0),
    "calibrate, s": ("calibrate_seconds", 0),
    "predict, ms an image": ("predict_ms", 1),
    "MB": ("megabytes", 2),
    "draws": ("draws", 0),
}
DETECTION = {
    f"{name}, {title}": (f"ood.{name}.{key}", 3)
    for name in OTHERS
    for title, key in (("AUROC ↑", "auroc"), ("AUPR ↑", "aupr"), ("FPR95 ↓", "fpr95"))
}


def write(results: Results, size: Size, *, in_docs: bool) -> None:
    """Prints all tables, or puts them and the plots into docs/results.md and README."""
    from benchmarks.quality import plots

    records = current(results, size)
    made = tables(records, published())
    if in_docs:
        drawn = plots.draw(records, DOCS.parent / "images")
        shown = "\n\n".join(f"![{alt}](images/{name})" for name, alt in drawn.items())
        ours = {name: text for name, text in made.items() if name.startswith("digest-")}
        rest = {name: text for name, text in made.items() if name not in ours}
        fill(DOCS, {**rest, "plots": shown or "Not measured yet."})
        fill(README, ours)
    for name, text in made.items():
        print(f"\n{name}\n\n{text}")


def current(results: Results, size: Size) -> Records:
    """What was made with the settings of today: anything else would be called by a wrong name."""
    read = results.read()
    done = [unit for unit in units(size) if results.state(unit, asked(unit, size)) == "done"]
    return {unit: read[unit] for unit in done}


def tables(records: Records, others: Rows) -> dict[str, str]:
    """Every table by the name of its place."""
    made = {}
    for network, title in NETWORKS.items():
        rows = headline(records, network)
        theirs = [row for row in others if row["checkpoint"] == network.partition("-")[2]]
        named = {f"*{row['method']} (published)*": [row] for row in theirs}
        columns = {**MEASURES, **FLOORS, **COSTS}
        made[f"headline-{network}"] = markdown(title, {**rows, **named}, columns)
        made[f"digest-{network}"] = markdown(title, digest(rows, theirs), DIGEST)
        made[f"detection-{network}"] = markdown(title, rows, DETECTION)
        made[f"bars-{network}"] = bars(title, rows, network)
    made["robustness"] = markdown("ResNet-20", robustness(records), ROBUSTNESS)
    made["ablations"] = markdown("ResNet-20", ablations(records), ABLATED)
    moved = by_what(records, "transfer", METHODS, TRANSFER)
    made["transfer"] = markdown("ResNet-20, head for CIFAR-100", moved, {**MEASURES})
    return made


def headline(records: Records, network: str) -> dict[str, Rows]:
    """Two rows a method, then the peers: measures of each seed."""
    found: dict[str, Rows] = {}
    for method in METHODS:
        fits = of(records, network, method, "fit")
        plain = of(records, network, method, "train-only")
        if plain:
            nothing = {"fit_seconds": 0.0, "megabytes": 0.0} if method == "MAP" else {}
            found[f"{method}, train only"] = [
                {**nothing, **_cost(fits.get(seed)), **with_floor(row)}
                for seed, row in plain.items()
            ]
        halves = [of(records, network, method, what) for what in CALIBRATED]
        both = [seed for seed in halves[0] if seed in halves[1]]
        if both:
            found[f"{method}, calibrated"] = [
                {**_cost(fits.get(seed)), **both_ways([half[seed] for half in halves])}
                for seed in both
            ]
    for peer in PEERS:
        if rows := of(records, network, peer, "peer"):
            found[peer] = [with_floor(row) for row in rows.values()]
    return found


def digest(rows: dict[str, Rows], theirs: Rows) -> dict[str, Rows]:
    """Every method as fitted, and the best published figure of each kind."""
    found = {
        CALLED.get(method, method): [{**row, "seeds": len(each)} for row in each]
        for method in METHODS
        if (each := rows.get(f"{method}, train only"))
    }
    if theirs:
        best: dict[str, Any] = {key: min(row[key] for row in theirs) for key in ("nll", "ece")}
        best["accuracy"] = max(row["accuracy"] for row in theirs)
        best["ood"] = max((row["ood"] for row in theirs), key=lambda ood: ood["svhn"]["auroc"])
        found["*best published figure of each kind*"] = [best]
    return found


def _cost(fit: dict[str, Any] | None) -> dict[str, Any]:
    return {} if fit is None else {key: fit[key] for key in ("fit_seconds", "megabytes")}


def of(records: Records, network: str, method: str, what: str) -> dict[int, dict[str, Any]]:
    """What was found of a method, by seed."""
    return {
        unit.seed: record["found"]
        for unit, record in sorted(records.items(), key=lambda item: item[0].seed)
        if (unit.network, unit.method, unit.what) == (network, method, what)
    }


def by_what(
    records: Records, what: str, methods: Iterable[str], network: str = "cifar10-resnet20"
) -> dict[str, Rows]:
    found = {method: list(of(records, network, method, what).values()) for method in methods}
    return {method: rows for method, rows in found.items() if rows}


def both_ways(halves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Averages of two halves; ECE of both together too, which has less bias than of each alone."""
    bins = [half["bins"] for half in halves if "bins" in half]  # older files have none
    pooled = {"ece_pooled": pooled_ece(bins)} if len(bins) == len(halves) else {}
    return {**average([with_floor(half) for half in halves]), **pooled}


def with_floor(row: dict[str, Any]) -> dict[str, Any]:
    """A row and the ECE that luck alone would make; older files do not tell."""
    return {**row, "ece_perfect": perfect_ece(row["bins"])} if "bins" in row else row


def average(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of all numbers that every part has, however deep."""
    first = parts[0]
    return {
        key: average([part[key] for part in parts])
        if isinstance(value, dict)
        else statistics.fmean(part[key] for part in parts)
        for key, value in first.items()
        if not isinstance(value, list) and all(part[key] is not None for part in parts)
    }


# Everything else

ROBUSTNESS = {
    "AP, PGD, by MI ↑": ("ap_epistemic", 3),
    "AP, PGD, by entropy ↑": ("ap_entropy", 3),
    "accuracy, PGD": ("accuracy_pgd", 3),
    "accuracy, FGSM of ResNet-56 ↑": ("fgsm_accuracy", 3),
    "AUROC, FGSM ↑": ("fgsm_auroc", 3),
    "NLL ↓": ("nll", 3),
    "NLL, turned by 30° ↓": ("nll_turned", 3),
    "KL to people ↓": ("kl", 3),
}
ABLATED = {**MEASURES, "AP, PGD, by MI ↑": ("ap_epistemic", 3), "fit, s": ("fit_seconds", 0)}


def robustness(records: Records, network: str = "cifar10-resnet20") -> dict[str, Rows]:
    found = {}
    for method in METHODS:
        row: dict[str, Any] = attacked(records, network, method)
        for fgsm in of(records, network, method, "fgsm").values():
            row |= {"fgsm_accuracy": fgsm["accuracy"], "fgsm_auroc": fgsm["fgsm"]["auroc"]}
        for turned in of(records, network, method, "rotation").values():
            plain, turned_points = turned["rotation"]
            row |= {"nll": plain["nll"], "nll_turned": turned_points["nll"]}
        for people in of(records, network, method, "people").values():
            row |= people
        if row:
            found[method] = [row]
    return found


def ablations(records: Records, network: str = "cifar10-resnet20") -> dict[str, Rows]:
    return {
        method: [{**row, **attacked(records, network, method)} for row in rows]
        for method, rows in by_what(records, "ablation", ABLATIONS, network).items()
    }


def attacked(records: Records, network: str, method: str) -> dict[str, float]:
    """Average precision over all shards that are there; one draw has no epistemic doubt."""
    shards = [one for what in ATTACKS for one in of(records, network, method, what).values()]
    if not shards:
        return {}
    found = {}
    draws = {**METHODS, **ABLATIONS}[method].draws
    for score in ("entropy", "epistemic") if draws > 1 else ("entropy",):
        clean, strange = (
            torch.tensor([value for shard in shards for value in shard[kind][score]])
            for kind in ("clean", "attacked")
        )
        found[f"ap_{score}"] = aupr(clean, strange)
    images = sum(len(shard["attacked"]["entropy"]) for shard in shards)
    right = sum(shard["attacked"]["right"] for shard in shards)
    return {**found, "accuracy_pgd": right / images}


def published() -> Rows:
    """What others reached on the same checkpoints, by their own account; figures only."""
    file = Path(os.environ.get("BAYESIFY_DATA", "")) / "published_cifar10.csv"
    if not file.is_file():
        print(f"no published rows: {file} is missing (BAYESIFY_DATA).", file=sys.stderr)
        return []
    with file.open() as lines:
        return [
            {
                **{key: float(row[key]) for key in ("nll", "ece", "accuracy", "brier")},
                "checkpoint": row["checkpoint"],
                "method": row["method"],
                "ood": {"svhn": {"auroc": float(row["auroc_svhn"])}},
            }
            for row in csv.DictReader(lines)
        ]
