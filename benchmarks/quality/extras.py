"""What else the papers claim: one seed, a few images, each method as it was fitted."""

from dataclasses import asdict
from typing import Any

import torch

import bayesify
from bayesify import MAP, Prediction
from bayesify.data import CIFAR10_NORMALISATION
from bayesify.evaluation.attacks import fgsm as craft_fgsm
from bayesify.evaluation.attacks import pgd as craft_pgd
from bayesify.evaluation.metrics import soft_label_kl
from bayesify.evaluation.shifts import sweep
from bayesify.zoo import load_model
from benchmarks.quality.headline import fitted, judge, untempered
from benchmarks.quality.labels import batches, images, test_data, test_labels
from benchmarks.quality.measures import detection, entropy, quality
from benchmarks.quality.settings import (
    CORRUPTIONS,
    DRAWS,
    RADIUS,
    ROTATION,
    SHARDS,
    STEP,
    STEPS,
    Size,
)
from benchmarks.quality.units import Unit

CRAFTED_ON = "cifar10-resnet56"


def pgd(unit: Unit, size: Size) -> dict[str, Any]:
    """Scores of clean and attacked images; tables pool the shards before they measure.

    The attacker climbs the mean prediction of other draws than those that are asked afterwards,
    before its temperature and in bf16, as networks are fitted: all of it takes a third of the time.
    """
    each, shard = size.few // SHARDS, int(unit.what.partition("-")[2])
    x, y = test_data(f"cifar10:test[{shard * each}:{(shard + 1) * each}]", unit.name).tensors
    bnn, _ = fitted(unit, size)
    with untempered(bnn), torch.autocast("cpu", torch.bfloat16):
        attacked = craft_pgd(
            bnn, x, y, radius=RADIUS, step=STEP, steps=STEPS, seed=unit.seed + 1,
            normalisation=CIFAR10_NORMALISATION,
        )  # fmt: skip
    found: dict[str, Any] = {}
    for name, inputs in (("clean", x), ("attacked", attacked)):
        prediction = bnn.predict(inputs, seed=unit.seed)
        found[name] = _scores(prediction) | {"right": int((prediction.label == y).sum())}
    return found


def _scores(prediction: Prediction) -> dict[str, list[float]]:
    values = {"entropy": entropy(prediction.probs), "epistemic": prediction.epistemic}
    return {name: [float(f"{v:.6g}") for v in each.tolist()] for name, each in values.items()}


def corruption(unit: Unit, size: Size) -> dict[str, Any]:
    """Uncertainty, accuracy and NLL as images get worse."""
    return {kind: _swept(unit, size, kind, None) for kind in CORRUPTIONS}


def rotation(unit: Unit, size: Size) -> dict[str, Any]:
    """The same for images as they are and turned."""
    return {"rotation": _swept(unit, size, "rotation", [0.0, ROTATION])}


def _swept(
    unit: Unit, size: Size, kind: str, severities: list[float] | None
) -> list[dict[str, Any]]:
    bnn, _ = fitted(unit, size)
    data = batches(test_data(f"cifar10:test[:{size.few}]", unit.name))
    points = sweep(bnn, data, kind, severities, normalisation=CIFAR10_NORMALISATION, seed=unit.seed)
    return [asdict(point) for point in points]


def people(unit: Unit, size: Size) -> dict[str, Any]:
    """How far predictions are from what people say of the same images (CIFAR-10H)."""
    bnn, _ = fitted(unit, size)
    probs = bnn.predict(batches(images(f"cifar10:test[:{size.few}]")), seed=unit.seed).probs
    shares = test_labels(f"cifar10h[:{size.few}]", unit.name)
    return {"kl": soft_label_kl(probs, shares).mean().item()}


def fgsm(unit: Unit, size: Size) -> dict[str, Any]:
    """Images crafted on a deeper network, shown to this one."""
    x, y = test_data(f"cifar10:test[:{size.few}]", unit.name).tensors
    crafted = craft_fgsm(
        bayesify.convert(load_model(CRAFTED_ON), MAP()), x, y,
        radius=RADIUS, normalisation=CIFAR10_NORMALISATION,
    )  # fmt: skip
    bnn, _ = fitted(unit, size)
    clean, strange = (bnn.predict(data, seed=unit.seed).probs for data in (x, crafted))
    return {"crafted_on": CRAFTED_ON, **quality(strange, y), **detection(clean, {"fgsm": strange})}


def draws(unit: Unit, size: Size) -> dict[str, Any]:
    """Quality against the number of draws, at the temperature that was chosen for the usual one."""
    x, y = test_data(f"cifar10:test[:{size.few}]", unit.name).tensors
    bnn, _ = fitted(unit, size)
    counts = draw_counts(bnn.method.components) if bnn.method.draws > 1 else [1]
    return {
        str(count): quality(bnn.predict(x, draws=count, seed=unit.seed).probs, y)
        for count in counts
    }


def draw_counts(components: int) -> list[int]:
    """The nearest to each of `DRAWS` that have equally many of each component."""
    return sorted({max(1, round(count / components)) * components for count in DRAWS})


def ablation(unit: Unit, size: Size) -> dict[str, Any]:
    """Fitted otherwise, measured as the headline is, on fewer images and SVHN alone."""
    bnn, found = fitted(unit, size)
    judged = judge(bnn, unit, size, slice(size.few), slice(size.few), ("svhn",))
    return {"fit_seconds": found["fit_seconds"], "kept": found["kept"], **judged}
