"""A verdict in plain language, made from the numbers of `compare` and nothing else.

The method to use is the one with the lowest negative log-likelihood among those that beat the
network's own beyond noise: a proper score, which counts both being right and knowing how sure to
be. If none does, one that detects other data better, or is better calibrated, is named for that;
if none is better at anything, the verdict says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What to do, and why.

    Args:
        chosen: The name of the method to use; None to keep the network as it is.
        headline: The advice, in a sentence.
        reasons: Sentences with the numbers behind it, and what it costs.
    """

    chosen: str | None
    headline: str
    reasons: tuple[str, ...]


def judge(results: Results) -> Verdict:
    """Says which method of a comparison to use, by how much it is better, and what it costs."""
    methods = results["methods"]
    base = results["baseline"]
    others = {name: method for name, method in methods.items() if name != base}
    network = methods[base]
    if not others:
        return Verdict(None, "Only the network itself was measured.", _standing(network))
    for wanted, merit, headline in (
        (_better_nll, _nll, "Use {0}: its probabilities are better than the network's own."),
        (
            _better_ood,
            _confusion,
            "No method improves the likelihood beyond noise, but {0} tells other data apart better "
            "than the network does.",
        ),
        (
            _better_ece,
            _ece,
            "No method improves the likelihood beyond noise, but {0} is better calibrated than "
            "the network.",
        ),
    ):
        found = {name: method for name, method in others.items() if wanted(method)}
        if found:
            chosen = min(found, key=lambda name: (merit(found[name]), _time(found[name])))
            return Verdict(
                chosen,
                headline.format(found[chosen]["title"]),
                (
                    *_standing(network),
                    *_gains(network, found[chosen]),
                    *_certain(found[chosen]),
                    *_price(found[chosen]),
                    *_cheaper(chosen, found if wanted is _better_nll else {}),
                ),
            )
    headline = "Keep the network as it is: on this data " + (
        f"none of the {len(others)} methods compared beats it beyond noise."
        if len(others) > 1
        else "the method compared does not beat it beyond noise."
    )
    best = min(others.values(), key=_nll)
    return Verdict(None, headline, (*_standing(network), *_gains(network, best)))


def _standing(network: Mapping[str, Any]) -> tuple[str, ...]:
    """How far the network's own confidence can be trusted, from its reliability curve."""
    curve = (network.get("curves") or {}).get("reliability")
    bins = [
        (said, right, count)
        for said, right, count in zip(
            *((curve or {}).get(key, ()) for key in ("confidence", "accuracy", "count")),
            strict=True,
        )
        if count and said is not None and right is not None
    ]
    total = sum(count for _, _, count in bins)
    if not total:
        return ()
    said = sum(s * count for s, _, count in bins) / total
    right = sum(r * count for _, r, count in bins) / total
    gap = 100 * (said - right)
    # Twice the standard error of the accuracy: what a test set of this size cannot tell.
    noise = 200 * math.sqrt(max(right * (1 - right), 1e-9) / total)
    if abs(gap) <= noise:
        how = "about as sure as it is right"
    else:
        how = f"{'too sure' if gap > 0 else 'not sure enough'} by {abs(gap):.1f} points"
    return (
        f"The network is right on {100 * right:.1f} % of the test set and {100 * said:.1f} % sure "
        f"on average: {how}.",
    )


def _gains(network: Mapping[str, Any], method: Mapping[str, Any]) -> tuple[str, ...]:
    """The method's numbers against the network's, each with whether it is within noise."""
    parts = []
    for name, title in (
        ("nll", "NLL"),
        ("ece", "calibration error"),
        ("rmse", "RMSE"),
        ("crps", "CRPS"),
        ("accuracy", "accuracy"),
    ):
        change = _change(network["measures"].get(name), method["measures"].get(name), name)
        if change:
            parts.append(f"{title} {change}")
    for other, measures in (method.get("ood") or {}).items():
        before = ((network.get("ood") or {}).get(other) or {}).get("auroc")
        if change := _change(before, measures.get("auroc"), "auroc"):
            parts.append(f"AUROC against {other} {change}")
    return (f"{method['title']} against the network: {'; '.join(parts)}.",) if parts else ()


def _change(before: Any, after: Any, name: str) -> str:
    if not before or not after or before["value"] is None or after["value"] is None:
        return ""
    per_cent = name == "accuracy"
    old, new = (
        f"{100 * measure['value']:.1f} %" if per_cent else f"{measure['value']:.3f}"
        for measure in (before, after)
    )
    word = {True: "better", False: "worse", None: "within noise"}[after.get("better")]
    if old == new and after.get("better") is None:
        return f"{new} as before"
    return f"{old} → {new} ({word})"


def _certain(method: Mapping[str, Any]) -> tuple[str, ...]:
    """A word of caution where nothing of a method that makes draws is random any more."""
    if method.get("noise") != 0 or method.get("draws", 1) == 1:
        return ()
    return (
        f"Calibration set the noise of {method['title']} to 0: it predicts without drawing, and "
        f"what doubt of its own it shows is between its members, if it has any.",
    )


def _price(method: Mapping[str, Any]) -> tuple[str, ...]:
    cost = method.get("cost") or {}
    parts = []
    if (ratio := cost.get("relative_time")) is not None:
        parts.append(f"a prediction takes {ratio:.1f} times the network's time")
    seconds = [cost[key] for key in ("fit_seconds", "calibrate_seconds") if cost.get(key)]
    if seconds:
        parts.append(f"making it took {duration(sum(seconds))}")
    if cost.get("bytes"):
        parts.append(f"it adds {size(cost['bytes'])} on disk")
    return (f"What it costs: {', '.join(parts)}.",) if parts else ()


def _cheaper(chosen: str, found: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The cheapest method whose likelihood is in the chosen one's interval, if it saves much."""
    best = found.get(chosen)
    high = best["measures"]["nll"].get("high") if best else None
    if best is None or high is None:
        return ()
    close = [m for m in found.values() if _nll(m) <= high and _time(m) < 0.7 * _time(best)]
    if not close:
        return ()
    other = min(close, key=lambda method: (_time(method), _nll(method)))
    return (
        f"Cheaper: {other['title']}, at {_time(other):.1f} times the network's time, has NLL "
        f"{_nll(other):.3f}, inside the interval of {best['title']}.",
    )


def _better_nll(method: Mapping[str, Any]) -> bool:
    return (method["measures"].get("nll") or {}).get("better") is True


def _better_ece(method: Mapping[str, Any]) -> bool:
    return (method["measures"].get("ece") or {}).get("better") is True and not _worse_nll(method)


def _better_ood(method: Mapping[str, Any]) -> bool:
    """Better at AUROC on at least one set, worse on none, and not at the likelihood's expense."""
    found = [(one.get("auroc") or {}).get("better") for one in (method.get("ood") or {}).values()]
    return True in found and False not in found and not _worse_nll(method)


def _worse_nll(method: Mapping[str, Any]) -> bool:
    return (method["measures"].get("nll") or {}).get("better") is False


def _confusion(method: Mapping[str, Any]) -> float:
    """One less the mean AUROC over the sets of other data."""
    found = [(one.get("auroc") or {}).get("value") for one in (method.get("ood") or {}).values()]
    known = [value for value in found if value is not None]
    return 1 - sum(known) / len(known) if known else math.inf


def _nll(method: Mapping[str, Any]) -> float:
    value = (method["measures"].get("nll") or {}).get("value")
    return math.inf if value is None else value


def _ece(method: Mapping[str, Any]) -> float:
    value = (method["measures"].get("ece") or {}).get("value")
    return math.inf if value is None else value


def _time(method: Mapping[str, Any]) -> float:
    value = (method.get("cost") or {}).get("relative_time")
    return math.inf if value is None else value


def duration(seconds: float) -> str:
    """A time that people can read."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes that people can read."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
