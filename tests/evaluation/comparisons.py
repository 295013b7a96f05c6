"""Results of a comparison as `compare` writes them, of toy predictions by a seeded generator."""

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float64]
CLASSES = ["aeroplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry"]
EXAMPLES, STRANGE, DRAWS = 1500, 600, 8
EDGES = np.linspace(0, np.log(len(CLASSES)), 25)
SHARPNESS = 2.4  # of the logits: the network is too sure
# Title, temperature, spread of the draws' logits, and costs: fit, predictions, bytes, memory.
METHODS = {
    "map": ("The network", 1.0, 0.0, (0.0, 1.0, 0, 61_000_000)),
    "temperature": ("Temperature", 1.9, 0.0, (0.4, 1.0, 24, 61_000_000)),
    "abnn": ("ABNN", 1.5, 1.5, (41.0, 8.3, 22_400, 88_000_000)),
    "bayes-adapter": ("BayesAdapter", 1.6, 1.6, (212.0, 20.4, 2_180_000, 142_000_000)),
    "ibnn": ("iBNN", 1.5, 1.1, (98.0, 8.1, 31_500, 90_000_000)),
    "mc-dropout": ("MC Dropout", 1.0, 0.6, (0.0, 8.0, 0, 61_500_000)),
}


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def entropy(probs: Array) -> Array:
    return -(probs * np.log(np.maximum(probs, 1e-12))).sum(-1)


class Toy:
    """A method's draws over logits that are the same for all methods."""

    def __init__(self, logits: Array, temperature: float, spread: float, seed: int = 1) -> None:
        noise = np.random.default_rng(seed).normal(size=(DRAWS, *logits.shape))
        draws = softmax((logits + spread * noise) / temperature)
        self.probs = draws.mean(0)
        self.total = entropy(self.probs)
        self.aleatoric = entropy(draws).mean(0)
        self.epistemic = self.total - self.aleatoric
        self.label = self.probs.argmax(-1)
        self.confidence = self.probs.max(-1)


def picture(index: int) -> str:
    rng = np.random.default_rng(index)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((32, 32), Image.Resampling.BICUBIC).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def auroc(inside: Array, outside: Array) -> float:
    return float((outside[:, None] > inside).mean() + 0.5 * (outside[:, None] == inside).mean())


def scores(toy: Toy, target: NDArray[Any], rows: NDArray[Any]) -> dict[str, float]:
    probs, confidence, target = toy.probs[rows], toy.confidence[rows], target[rows]
    right = probs.argmax(-1) == target
    places = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((confidence - right)[places == bin_].sum()) for bin_ in range(15)]
    wrong = ~right[np.argsort(-confidence)]
    return {
        "accuracy": right.mean(),
        "nll": -np.log(probs[np.arange(len(rows)), target]).mean(),
        "ece": sum(gaps) / len(rows),
        "brier": ((probs - np.eye(len(CLASSES))[target]) ** 2).sum(-1).mean(),
        "aurc": (np.cumsum(wrong) / np.arange(1, len(wrong) + 1)).mean(),
    }


def measures(
    found: list[dict[str, float]], base: list[dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """The first is of the whole set, the others of bootstrap samples, the same for both."""
    answer = {}
    for name in found[0]:
        values = np.array([one[name] for one in found[1:]])
        sign = 1 if name in ("accuracy", "auroc", "aupr") else -1
        difference = sign * (values - np.array([one[name] for one in base[1:]]))
        low, high = np.percentile(difference, (2.5, 97.5))
        answer[name] = {
            "value": float(found[0][name]),
            "low": float(np.percentile(values, 2.5)),
            "high": float(np.percentile(values, 97.5)),
            "better": True if low > 0 else False if high < 0 else None,
        }
    return answer


def curves(toy: Toy, target: NDArray[Any], strange: dict[str, Toy]) -> dict[str, Any]:
    right = toy.label == target
    places = np.minimum((toy.confidence * 10).astype(int), 9)
    full = [bin_ for bin_ in range(10) if (places == bin_).any()]
    wrong = ~right[np.argsort(-toy.confidence)]
    kept = np.unique(np.linspace(1, len(wrong), 150).astype(int))

    def shares(values: Array) -> list[float]:
        return (np.histogram(np.clip(values, 0, EDGES[-1]), EDGES)[0] / len(values)).tolist()

    return {
        "reliability": {
            "confidence": [float(toy.confidence[places == bin_].mean()) for bin_ in full],
            "accuracy": [float(right[places == bin_].mean()) for bin_ in full],
            "count": [int((places == bin_).sum()) for bin_ in full],
        },
        "risk_coverage": {
            "coverage": (kept / len(wrong)).tolist(),
            "risk": (np.cumsum(wrong)[kept - 1] / kept).tolist(),
        },
        "entropy": {
            "edges": EDGES.tolist(),
            "test": shares(toy.total),
            "ood": {name: shares(other.total) for name, other in strange.items()},
        },
    }


def shown(
    toy: Toy, target: NDArray[Any] | None, order: NDArray[Any], set_: str
) -> list[dict[str, Any]]:
    return [
        {
            "index": int(i),
            "set": set_,
            "label": int(toy.label[i]),
            "target": None if target is None else int(target[i]),
            "confidence": float(toy.confidence[i]),
            "entropy": float(toy.total[i]),
            "epistemic": float(toy.epistemic[i]),
            "image": picture(int(i)),
        }
        for i in order[:8]
    ]


def make_results(*, resamples: int = 40) -> dict[str, Any]:
    """A whole comparison: six methods, two sets of other data, one corruption."""
    rng = np.random.default_rng(0)
    target = rng.integers(0, len(CLASSES), EXAMPLES)
    signal = 6.5 * np.eye(len(CLASSES))[target] * rng.uniform(0.3, 1.6, (EXAMPLES, 1))
    noise = rng.normal(size=(EXAMPLES, len(CLASSES))) * 1.7
    strange = {
        "svhn": rng.normal(size=(STRANGE, len(CLASSES))) * 1.5,
        "textures": rng.normal(size=(STRANGE, len(CLASSES))) * 2.1,
    }
    samples = [np.arange(EXAMPLES), *rng.integers(0, EXAMPLES, (resamples, EXAMPLES))]
    others = [np.arange(STRANGE), *rng.integers(0, STRANGE, (resamples, STRANGE))]
    methods: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for name, (title, temperature, spread, cost) in METHODS.items():
        toy = Toy(SHARPNESS * (signal + noise), temperature, spread)
        outside = {
            key: Toy(SHARPNESS * logits, temperature, 1.5 * spread)
            for key, logits in strange.items()
        }
        found = [scores(toy, target, rows) for rows in samples]
        detected = {
            key: [
                {"auroc": auroc(toy.total[rows[:400]], other.total[picked[:300]])}
                for rows, picked in zip(samples, others, strict=True)
            ]
            for key, other in outside.items()
        }
        if not first:
            first = {"test": found, **detected}
        severities = np.linspace(0, 1, 6)
        worse = [
            Toy(SHARPNESS * ((1 - s) * signal + noise), temperature, spread * (1 + 2 * s))
            for s in severities
        ]
        wrong = np.flatnonzero(toy.label != target)
        methods[name] = {
            "title": title,
            "settings": {} if name == "map" else {"draws": DRAWS, "lr": 0.0003},
            "noise": spread,
            "temperature": temperature,
            "slope": 0.0,
            "draws": DRAWS if spread else 1,
            "fit": None if not cost[0] else f"3 epochs in {cost[0]} s",
            "cost": {
                "fit_seconds": cost[0],
                "calibrate_seconds": 0.5 if spread else 0.0,
                "relative_time": cost[1],
                "bytes": cost[2],
                "peak_bytes": cost[3],
            },
            "measures": measures(found, first["test"]),
            "ood": {key: measures(values, first[key]) for key, values in detected.items()},
            "curves": {
                **curves(toy, target, outside),
                "shift": {
                    "kind": "gaussian",
                    "severity": severities.tolist(),
                    "entropy": [float(one.total.mean()) for one in worse],
                    "aleatoric": [float(one.aleatoric.mean()) for one in worse],
                    "epistemic": [float(one.epistemic.mean()) for one in worse],
                    "accuracy": [float((one.label == target).mean()) for one in worse],
                },
            },
            "per_class": [
                {
                    "class": label,
                    "examples": int((target == label).sum()),
                    "accuracy": float((toy.label == target)[target == label].mean()),
                    "confidence": float(toy.confidence[target == label].mean()),
                    "entropy": float(toy.total[target == label].mean()),
                }
                for label in range(len(CLASSES))
            ],
            "examples": {
                "surest_wrong": shown(
                    toy, target, wrong[np.argsort(-toy.confidence[wrong])], "cifar10:test"
                ),
                "most_epistemic": shown(toy, target, np.argsort(-toy.epistemic), "cifar10:test"),
                "most_aleatoric": shown(toy, target, np.argsort(-toy.aleatoric), "cifar10:test"),
                "most_uncertain_ood": shown(
                    outside["svhn"], None, np.argsort(-outside["svhn"].total), "svhn"
                ),
            },
        }
    return {
        "format": 1,
        "bayesify": "0.1.0",
        "command": "bayesify compare cifar10-resnet20 cifar10:train cifar10:test --ood svhn=svhn",
        "seed": 0,
        "network": {"class": "ResNet20", "parameters": 272_474},
        "data": {
            "test": {"name": "cifar10:test", "examples": EXAMPLES},
            "ood": dict.fromkeys(strange, STRANGE),
        },
        "classes": CLASSES,
        "baseline": "map",
        "methods": methods,
    }
