"""What of issue 6 holds."""

import operator
from collections.abc import Callable

from benchmarks.quality.markdown import Rows, mean
from benchmarks.quality.settings import METHODS

# NLL, ECE, ECE calibrated, minutes of fit and calibration: at most. The others: at least.
BARS = {
    "cifar10-resnet20": (0.215, 0.009, 0.0075, 0.928, 0.93, 10),
    "cifar10-resnet56": (0.178, 0.009, 0.0075, 0.944, 0.966, 30),
}
MOST_DRAWS = 24
HOLDS, MISSED = "✓", "✗"
BASELINES = ("MAP", "Temperature", "Mirroring")  # what the others are held against


def bars(title: str, rows: dict[str, Rows], network: str) -> str:
    """Each bar, with a mark where it holds; and whether temperature scaling is beaten."""
    lines = []
    for method in METHODS:
        plain = rows.get(f"{method}, train only", [])
        if method in BASELINES or not plain:
            continue
        tuned = rows.get(f"{method}, calibrated", [])
        base = [rows.get(f"Temperature, {how}", []) for how in ("train only", "calibrated")]
        marks = checks(plain, tuned, *base, network)
        if not lines:
            lines = [
                f"| {title} | {' | '.join(marks)} | all |",
                f"|---|{'---:|' * len(marks)}---:|",
            ]
        good = all(mark.endswith(HOLDS) for mark in marks.values())
        lines.append(f"| {method} | {' | '.join(marks.values())} | {HOLDS if good else MISSED} |")
    return "\n".join(lines) or "Not measured yet."


def checks(plain: Rows, tuned: Rows, base: Rows, tuned_base: Rows, network: str) -> dict[str, str]:
    """What a method reaches as fitted and calibrated, by what is sought.

    Temperature scaling is the base, as fitted and calibrated on the same halves.
    """
    nll, ece, calibrated_ece, accuracy, auroc, minutes = BARS[network]
    fit, calibrate = mean(plain, "fit_seconds"), mean(tuned, "calibrate_seconds")
    alone = None if fit is None else fit / 60
    both = None if alone is None or calibrate is None else alone + calibrate / 60
    detected = mean(plain, "ood.svhn.auroc")
    return {
        f"NLL ≤ {nll}": at_most(mean(plain, "nll"), nll),
        f"ECE ≤ {ece}": at_most(mean(plain, "ece"), ece),
        f"ECE, calibrated ≤ {calibrated_ece}": at_most(mean(tuned, "ece"), calibrated_ece),
        f"the same, halves pooled ≤ {calibrated_ece}": at_most(
            mean(tuned, "ece_pooled"), calibrated_ece
        ),
        f"accuracy ≥ {accuracy}": at_least(mean(plain, "accuracy"), accuracy),
        f"AUROC ≥ {auroc}": at_least(detected, auroc),
        f"draws ≤ {MOST_DRAWS}": at_most(mean(plain, "draws"), MOST_DRAWS),
        f"minutes ≤ {minutes}": at_most(alone, minutes),
        f"minutes, with `calibrate` ≤ {minutes}": at_most(both, minutes),
        "NLL ≤ temperature's": at_most(mean(plain, "nll"), mean(base, "nll")),
        "AUROC > temperature's": above(detected, mean(base, "ood.svhn.auroc")),
        "the same, calibrated": above(
            mean(tuned, "ood.svhn.auroc"), mean(tuned_base, "ood.svhn.auroc")
        ),
    }


def at_most(value: float | None, bar: float | None) -> str:
    return _mark(value, bar, operator.le)


def at_least(value: float | None, bar: float | None) -> str:
    return _mark(value, bar, operator.ge)


def above(value: float | None, bar: float | None) -> str:
    return _mark(value, bar, operator.gt)


def _mark(value: float | None, bar: float | None, holds: Callable[[float, float], bool]) -> str:
    """A number and whether it holds; what was not measured does not."""
    if value is None or bar is None:
        return "-"
    return f"{value:.4g} {HOLDS if holds(value, bar) else MISSED}"
