"""How many of the norms should ABNN make random? By training images alone: no test set is read.

    BAYESIFY_DATA=../shared/data python benchmarks/abnn_share.py NETWORK

NETWORK is resnet20 or resnet56. The last third, half and two thirds of the norms, and all, are
tried as `where="auto"` tries its candidates, with its rule: the cheapest that is worse than the
best by no more than a standard error. 12 draws; three times 2,000 training images under strong
augmentation, half of them to calibrate and half to judge. Writes
benchmarks/results/abnn_share-NETWORK.json time by time.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from bayesify import ABNN, choosing
from bayesify.augmentation import strong
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"
SHARES = (1 / 3, 1 / 2, 2 / 3, 1.0)


def images(time: int) -> list[Any]:
    spec = f"cifar10:train[{2000 * time}:{2000 * (time + 1)}]"
    torch.manual_seed(time)
    loader = DataLoader(load_data(spec, normalise=CIFAR10_NORMALISATION), batch_size=250)
    return [(strong(x), y) for x, y in loader]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    name = parser.parse_args().network
    choosing.SHARES = SHARES
    results: dict[str, Any] = {"command": f"python benchmarks/abnn_share.py {name}", "times": []}
    for time in range(3):
        model = load_model(f"cifar10-{name}")
        choice = choosing.choose(model, ABNN(draws=12), validation=images(time), seed=time)
        print(choice, flush=True)
        found = dataclasses.asdict(choice)
        results["times"].append({k: found[k] for k in ("candidates", "examples")})
        (RESULTS / f"abnn_share-{name}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
