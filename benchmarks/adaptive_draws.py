"""What `predict(tolerance=)` saves and what it costs, on the public ResNet-20.

    BAYESIFY_DATA=../shared/data python benchmarks/adaptive_draws.py

ABNN(noise=0.07), not fitted, 24 draws, on 2,000 test images of CIFAR-10 and 1,000 of SVHN. Each
tolerance is held against all draws of the same seed: draws used, the share of examples with a
probability that differs by more than the tolerance, the largest difference, accuracy and NLL.
Images run 500 at a time, with all draws and with each tolerance in turn, so that times are of the
same minutes; they are CPU times, which other processes disturb less. A first run on training
images, which makes the tapes, is not counted. The rule's constants were chosen on training images;
nothing was chosen on these.
Writes benchmarks/results/adaptive_draws.json.
"""

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, Prediction
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

FILE = Path(__file__).parent / "results" / "adaptive_draws.json"
DATA = {"cifar10": "cifar10:test[8000:]", "svhn": "svhn[:1000]"}
WARM_UP = "cifar10:train[:500]"
NOISE, DRAWS, TOGETHER = 0.07, 24, 500
TOLERANCES = (0.01, 0.02, 0.05, 0.1)


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    data = load_data(name, normalise=CIFAR10_NORMALISATION)
    return [(x, y) for x, y in DataLoader(data, batch_size=TOGETHER)]


def timed(bnn: bayesify.BayesianModel, x: Tensor, tolerance: float | None) -> tuple[Any, float]:
    started = time.process_time()
    prediction = bnn.predict(x, draws=DRAWS, tolerance=tolerance)
    return prediction, time.process_time() - started


def quality(prediction: Prediction, target: Tensor) -> dict[str, float]:
    nll = -prediction.probs.gather(1, target[:, None]).log().mean()
    return {
        "accuracy": (prediction.label == target).float().mean().item(),
        "nll": nll.item(),
    }


def compared(prediction: Prediction, full: Prediction, tolerance: float) -> dict[str, Any]:
    off = (prediction.probs - full.probs).abs().amax(1)
    used = prediction.used if prediction.used is not None else torch.empty(0)
    return {
        "mean_draws": used.float().mean().item(),
        "share_by_draws": {
            int(n): (used == n).float().mean().item() for n in used.unique().tolist()
        },
        "share_beyond_tolerance": (off > tolerance).float().mean().item(),
        "largest_difference": off.max().item(),
        "labels_changed": (prediction.label != full.label).float().mean().item(),
    }


def main() -> None:
    bnn = bayesify.convert(load_model("cifar10-resnet20"), ABNN(noise=NOISE))
    settings = (None, *TOLERANCES)
    for x, _ in batches(WARM_UP):
        for tolerance in settings:
            timed(bnn, x, tolerance)
    results: dict[str, Any] = {
        "command": "python benchmarks/adaptive_draws.py",
        "network": "cifar10-resnet20",
        "method": str(bnn.method),
        "draws": DRAWS,
        "examples_together": TOGETHER,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "data": {},
    }
    for name, spec in DATA.items():
        runs: dict[float | None, list[tuple[Prediction, float]]] = {s: [] for s in settings}
        targets = []
        for turn, (x, y) in enumerate(batches(spec)):
            targets.append(y)
            first = turn % len(settings)
            for tolerance in settings[first:] + settings[:first]:
                runs[tolerance].append(timed(bnn, x, tolerance))
        target = torch.cat(targets)
        joined = {s: Prediction.cat([p for p, _ in parts]) for s, parts in runs.items()}
        seconds = {s: [taken for _, taken in parts] for s, parts in runs.items()}
        known = name == "cifar10"  # others have no label among the network's classes
        all_draws: dict[str, Any] = quality(joined[None], target) if known else {}
        rows = []
        for tolerance in TOLERANCES:
            ratios = [a / b for a, b in zip(seconds[tolerance], seconds[None], strict=True)]
            row = {"tolerance": tolerance} | compared(joined[tolerance], joined[None], tolerance)
            row |= quality(joined[tolerance], target) if known else {}
            row |= {"time_ratio": statistics.median(ratios), "time_ratios": ratios}
            rows.append(row)
            print(
                f"{name}, tolerance {tolerance:g}: {row['mean_draws']:.1f} draws, "
                f"{row['share_beyond_tolerance']:.2%} beyond it, at most "
                f"{row['largest_difference']:.3f}; time x {row['time_ratio']:.2f}"
                + (f"; accuracy {row['accuracy']:.4f}, NLL {row['nll']:.4f}" if known else ""),
                flush=True,
            )
        all_draws["cpu_seconds"] = sum(seconds[None])
        print(f"{name}, all {DRAWS} draws: {all_draws}", flush=True)
        results["data"][name] = {
            "spec": spec, "examples": len(target), "all_draws": all_draws, "rows": rows,
        }  # fmt: skip
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
