"""What `results.json` holds, and the check that it does.

`compare` writes it, the report reads it. Only what the report reads is described here, so that a
newer `compare` may say more.
"""

import math
from collections.abc import Mapping
from typing import Any

from bayesify.errors import CorruptFileError

FORMAT = 1
NEXT = "Make it again with `bayesify compare`."
NUMBER = (float, int, type(None))
NUMBERS = [NUMBER]
NATS = ("entropy", "aleatoric", "epistemic")
MEASURE = {"value": NUMBER, "low?": NUMBER, "high?": NUMBER, "better?": bool}
SHOWN = [
    {
        "index": int,
        "label": int,
        "set?": str,
        "target?": int,
        "confidence": NUMBER,
        "entropy?": NUMBER,
        "epistemic?": NUMBER,
        "image?": str,
    }
]
# What the page reads: a name with ? may be missing or null, * stands for any name.
SHAPE = {
    "format": int,
    "bayesify?": str,
    "command?": str,
    "seed?": int,
    "network?": {"class?": str, "parameters?": int},
    "data?": {"test?": {"name?": str, "examples?": int}, "ood?": {"*": int}},
    "classes?": [(str, int)],
    "baseline": str,
    "methods": {
        "*": {
            "title": str,
            "settings?": dict,
            "noise?": NUMBER,
            "temperature?": NUMBER,
            "slope?": NUMBER,
            "draws?": int,
            "fit?": str,
            "cost?": {"*": NUMBER},
            "measures": {"*": MEASURE},
            "ood?": {"*": {"*": MEASURE}},
            "curves?": {
                "reliability?": {"confidence": NUMBERS, "accuracy": NUMBERS, "count": [int]},
                "risk_coverage?": {"coverage": NUMBERS, "risk": NUMBERS},
                "entropy?": {"edges": NUMBERS, "test": NUMBERS, "ood?": {"*": NUMBERS}},
                "shift?": {
                    "kind": str,
                    "severity": NUMBERS,
                    "entropy": NUMBERS,
                    "aleatoric": NUMBERS,
                    "epistemic": NUMBERS,
                    "accuracy?": NUMBERS,
                },
            },
            "per_class?": [
                {
                    "class": int,
                    "examples": int,
                    "accuracy": NUMBER,
                    "confidence": NUMBER,
                    "entropy?": NUMBER,
                }
            ],
            "examples?": {"*": SHOWN},
        }
    },
}


def check(results: Any) -> dict[str, Any]:
    """The results with everything the page reads in place and of its kind.

    What is missing and may be is None or empty, and a number that is not finite is None.

    Raises:
        CorruptFileError: If something else is missing or of another kind.
    """
    if isinstance(results, Mapping) and results.get("format") != FORMAT:
        raise CorruptFileError(
            f"the results have format {results.get('format')!r} where {FORMAT} is read here. "
            f"Update bayesify, or make them again with `bayesify compare`."
        )
    checked: dict[str, Any] = _check(results, SHAPE, "results")
    methods, base = checked["methods"], checked["baseline"]
    if base not in methods:
        raise CorruptFileError(f"results.baseline {base!r} is not one of the methods. {NEXT}")
    for name, method in methods.items():
        _require_curves(method["curves"], f"results.methods.{name}.curves")
    # The network comes first, wherever it stood, and is called so.
    network = methods.pop(base)
    if "network" not in network["title"].lower():
        network["title"] = f"Network ({network['title']})"
    checked["methods"] = {base: network, **methods}
    return checked


def _check(value: Any, shape: Any, where: str) -> Any:
    if isinstance(shape, dict):
        _require(isinstance(value, Mapping), where, "an object", value)
        if "*" in shape:
            return {key: _check(one, shape["*"], f"{where}.{key}") for key, one in value.items()}
        found = {}
        for name, inner in shape.items():
            key = name.removesuffix("?")
            if value.get(key) is not None:
                found[key] = _check(value[key], inner, f"{where}.{key}")
            else:
                nullable = isinstance(inner, tuple) and type(None) in inner and key in value
                _require(nullable or name != key, where, f"an object with {key!r}", value)
                found[key] = _nothing(inner)
        return found
    if isinstance(shape, list):
        _require(isinstance(value, list), where, "a list", value)
        return [_check(one, shape[0], f"{where}[{place}]") for place, one in enumerate(value)]
    right = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    _require(right, where, f"of type {_named(shape)}", value)
    return _finite(value) if shape is NUMBER else value


def _nothing(shape: Any) -> Any:
    """What stands for something that is missing: an empty list or object, or None."""
    if isinstance(shape, list):
        return []
    if isinstance(shape, dict) and ("*" in shape or all(name.endswith("?") for name in shape)):
        return _check({}, shape, "")
    return None


def _finite(value: float | None) -> float | None:
    try:
        return None if value is None or not math.isfinite(value) else float(value)
    except OverflowError:  # a whole number beyond all floats
        return None


def _require_curves(curves: Mapping[str, Any], where: str) -> None:
    """Checks that the lists of a curve belong together, and that shares are shares."""
    for kind, curve in curves.items():
        if curve is None:
            continue
        lists = {name: values for name, values in curve.items() if isinstance(values, list)}
        lists |= {f"ood.{name}": values for name, values in (curve.get("ood") or {}).items()}
        lengths = {len(values) - (name == "edges") for name, values in lists.items() if values}
        if len(lengths) > 1:
            raise CorruptFileError(f"the lists of {where}.{kind} differ in length. {NEXT}")
        for name in (
            set(lists) - {"edges", "severity", "count"} - set(NATS if kind == "shift" else ())
        ):
            if any(value is not None and not -1e-6 <= value <= 1 + 1e-6 for value in lists[name]):
                raise CorruptFileError(f"{where}.{kind}.{name} must be in 0 to 1. {NEXT}")


def _require(condition: bool, where: str, wanted: str, value: Any) -> None:
    if not condition:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:59]}…"
        raise CorruptFileError(f"{where} must be {wanted}, not {shown}. {NEXT}")


def _named(shape: Any) -> str:
    kinds = shape if isinstance(shape, tuple) else (shape,)
    return " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
