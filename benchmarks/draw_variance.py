"""How much a prediction varies with the seed of its draws: mirrored pairs against independent ones.

    BAYESIFY_DATA=../shared/data python benchmarks/draw_variance.py

ResNet-20, untrained, 300 test images without their labels, 24 seeds. Of the draws of each seed,
the first n are n / 2 mirrored pairs; every other one of the first 2 n is n draws that are
independent. The variance of a mean of n over the seeds, averaged over images and classes, is
compared at equal n, which is equal cost. Writes benchmarks/results/draw_variance.json.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, Method
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

FILE = Path(__file__).parent / "results" / "draw_variance.json"
IMAGES, SEEDS, COUNTS = 300, 24, (2, 6, 12, 24)
METHODS: dict[str, Method] = {
    "ABNN, noise 0.05": ABNN(members=1, noise=0.05),
}


def variances(method: Method) -> list[dict[str, float]]:
    data = load_data(f"cifar10:test[:{IMAGES}]", normalise=CIFAR10_NORMALISATION)
    images, _ = next(iter(DataLoader(data, batch_size=IMAGES)))
    bnn = bayesify.convert(load_model("cifar10-resnet20"), method)
    most = 2 * max(COUNTS)
    runs = [bnn.predict(images, draws=most, seed=seed, keep_draws=True) for seed in range(SEEDS)]
    draws = torch.stack([run.draws for run in runs]).double()
    rows = []
    for count in COUNTS:
        mirrored = draws[:, :count].mean(1).var(0).mean().item()
        independent = draws[:, : 2 * count : 2].mean(1).var(0).mean().item()
        ratio = round(independent / mirrored, 2)
        rows.append(
            {"draws": count, "independent": independent, "mirrored": mirrored, "ratio": ratio}
        )
        print(type(method).__name__, method.noise, rows[-1], flush=True)
    return rows


def main() -> None:
    results: dict[str, Any] = {
        "command": "python benchmarks/draw_variance.py",
        "images": IMAGES,
        "seeds": SEEDS,
        "methods": {name: variances(method) for name, method in METHODS.items()},
    }
    FILE.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
