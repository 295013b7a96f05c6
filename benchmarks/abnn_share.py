"""How many of the norms should ABNN make random? By training images alone: no test set is read.

    BAYESIFY_DATA=../shared/data python benchmarks/abnn_share.py NETWORK [--detect]

NETWORK is resnet20 or resnet56. The last third, half and two thirds of the norms, and all, are
tried as `where="auto"` tries its candidates, with its rule: the cheapest that is worse than the
best by no more than a standard error. 12 draws; three times 2,000 training images under strong
augmentation, half of them to calibrate and half to judge. Writes
benchmarks/results/abnn_share-NETWORK.json time by time. With --detect, which comes after, it adds
how well predictive entropy tells the images that judge from 1,000 other training images that were
made strange (AUROC): cut into 16 pieces and shuffled, in negative colours, and two laid over each
other.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, choosing
from bayesify.augmentation import strong
from bayesify.batches import labelled
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.evaluation.detection import auroc
from bayesify.validation import HeldOut
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"
SHARES = (1 / 3, 1 / 2, 2 / 3, 1.0)


def images(time: int) -> list[Any]:
    spec = f"cifar10:train[{2000 * time}:{2000 * (time + 1)}]"
    torch.manual_seed(time)
    loader = DataLoader(load_data(spec, normalise=CIFAR10_NORMALISATION), batch_size=250)
    return [(strong(x), y) for x, y in loader]


def detect(name: str, results: dict[str, Any]) -> None:
    """Adds each candidate's AUROC, at the noise and temperature that were chosen for it."""
    model = load_model(f"cifar10-{name}")
    for time, found in enumerate(results["times"]):
        inside = [x for x, _ in HeldOut(list(labelled(images(time)))).halves()[1]]
        strange = made_strange(time)
        for candidate in found["candidates"]:
            bnn = bayesify.convert(model, ABNN(draws=12), where=candidate["where"])
            bnn.noise, bnn.temperature = candidate["noise"], candidate["temperature"]
            usual = torch.cat([bnn.predict(x, seed=time).uncertainty for x in inside])
            candidate["auroc"] = {
                kind: auroc(usual, bnn.predict(x, seed=time, batch_size=250).uncertainty)
                for kind, x in strange.items()
            }
            print(name, time, candidate["where"], candidate["auroc"], flush=True)


def made_strange(time: int) -> dict[str, Tensor]:
    """Training images of no class, of the last ones, which nothing else here sees."""
    spec = f"cifar10:train[{49000 - 1000 * time}:{50000 - 1000 * time}]"
    plain = next(iter(DataLoader(load_data(spec), batch_size=1000)))[0]
    torch.manual_seed(time)
    pieces = plain.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)  # image, channel, piece, y, x
    order = torch.rand(len(plain), 16).argsort(1)[:, None, :, None, None]
    shuffled = pieces.gather(2, order.expand_as(pieces)).unflatten(2, (4, 4))
    kinds = {
        "shuffled": shuffled.permute(0, 1, 2, 4, 3, 5).reshape(plain.shape),
        "negative": 1 - plain,
        "overlaid": (plain + plain.roll(1, 0)) / 2,
    }
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CIFAR10_NORMALISATION)
    return {kind: (images - mean) / std for kind, images in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    parser.add_argument("--detect", action="store_true")
    asked = parser.parse_args()
    name, file = asked.network, RESULTS / f"abnn_share-{asked.network}.json"
    if asked.detect:
        results = json.loads(file.read_text())
        detect(name, results)
        file.write_text(json.dumps(results, indent=2) + "\n")
        return
    choosing.SHARES = SHARES
    results = {"command": f"python benchmarks/abnn_share.py {name}", "times": []}
    for time in range(3):
        model = load_model(f"cifar10-{name}")
        choice = choosing.choose(model, ABNN(draws=12), validation=images(time), seed=time)
        print(choice, flush=True)
        found = dataclasses.asdict(choice)
        results["times"].append({k: found[k] for k in ("candidates", "examples")})
        file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
