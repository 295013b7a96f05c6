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
    nll, ece, calibrated_ece, accuracy, auroc, minutes = BARS[network]
    base = rows.get("Temperature, train only", [])
    lines = [
        f"| {title} | NLL ≤ {nll} | ECE ≤ {ece} | ECE, calibrated ≤ {calibrated_ece} "
        f"| accuracy ≥ {accuracy} | AUROC ≥ {auroc} | draws ≤ {MOST_DRAWS} | minutes ≤ {minutes} "
        f"| minutes, with `calibrate` ≤ {minutes} | NLL ≤ temperature's | AUROC > temperature's "
        "| all |",
        f"|---|{'---:|' * 11}",
    ]
    for method in METHODS:
        plain = rows.get(f"{method}, train only", [])
        tuned = rows.get(f"{method}, calibrated", [])
        if method in BASELINES or not plain:
            continue
        fit, calibrate = mean(plain, "fit_seconds"), mean(tuned, "calibrate_seconds")
        alone = None if fit is None else fit / 60
        both = None if alone is None or calibrate is None else alone + calibrate / 60
        checks = [
            at_most(mean(plain, "nll"), nll),
            at_most(mean(plain, "ece"), ece),
            at_most(mean(tuned, "ece"), calibrated_ece),
            at_least(mean(plain, "accuracy"), accuracy),
            at_least(mean(plain, "ood.svhn.auroc"), auroc),
            at_most(mean(plain, "draws"), MOST_DRAWS),
            at_most(alone, minutes),
            at_most(both, minutes),
            at_most(mean(plain, "nll"), mean(base, "nll")),
            above(mean(plain, "ood.svhn.auroc"), mean(base, "ood.svhn.auroc")),
        ]
        good = all(check.endswith(HOLDS) for check in checks)
        lines.append(f"| {method} | {' | '.join(checks)} | {HOLDS if good else MISSED} |")
    return "\n".join(lines) if len(lines) > 2 else "Not measured yet."


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
