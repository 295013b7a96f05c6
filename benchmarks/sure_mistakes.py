"""Should a few sure mistakes decide the temperature? By training images: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.sure_mistakes SET

Some mistakes that a network is sure of are wrong labels, or objects that nobody can see. Each costs
so much that the likeliest temperature makes the network less sure of everything. Three calibrations
of the same draws, chosen on one half of a set and measured on the other, both ways round, in the
mean of ten ways to halve it:

    likeliest   the temperature with the lowest NLL
    robust      the temperature with the lowest NLL if any label may be wrong:
                p(y) = (1 - lapse) softmax(z / T)_y + lapse / classes, where lapse is chosen too
    lapse       the same, with the lapse in predictions too

SET is resnet20 (the mixture of `make bench-quality`, seed 0, as fitted, on five strong
augmentations of the 2,000 training images that its fit held out; halves have different images) or
fashion (a small network trained on 50,000 training images of Fashion-MNIST, and ABNN, BayesAdapter
and iBNN of it, on the other 10,000 as they are). Adds to benchmarks/results/sure_mistakes.json.

Decided before it was run: of `robust` and `lapse`, `calibrate` takes what has the lower ECE in the
mean over all five, if that is lower than the likeliest's, and if NLL is higher by no more than 1 %
on any.
"""

import argparse
import json
import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, IBNN, MAP, BayesAdapter, BayesianModel
from bayesify.augmentation import crop_and_flip, strong
from bayesify.batches import as_inputs
from bayesify.calibration import best_temperature
from bayesify.data import load_data
from bayesify.likelihood import Classification
from bayesify.validation import hold_out, seeded
from benchmarks.quality.headline import fitted
from benchmarks.quality.labels import training_batches
from benchmarks.quality.measures import pooled_ece, quality
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import FULL
from benchmarks.quality.units import Unit

FILE = RESULTS / "sure_mistakes.json"
AUGMENTATIONS, SPLITS = 5, 10
FASHION = (0.286, 0.353)  # mean and standard deviation of its pixels


def tempered(logits: Tensor, temperature: float, lapse: float = 0.0) -> Tensor:
    probs = (logits / temperature).softmax(2).mean(0)
    return (1 - lapse) * probs + lapse / probs.shape[1]


def likeliest_pair(logits: Tensor, target: Tensor) -> tuple[float, float]:
    """Temperature and lapse with the lowest NLL together."""

    def loss(point: list[float]) -> float:
        lapse = 1 / (1 + math.exp(-point[1]))
        probs = tempered(logits, math.exp(point[0]), lapse)
        return -probs[torch.arange(len(target)), target].log().mean().item()

    found = minimize(
        loss, [0.0, -6.0], method="Nelder-Mead", options={"xatol": 0.01, "fatol": 1e-6}
    )
    return math.exp(found.x[0]), 1 / (1 + math.exp(-found.x[1]))


def calibrations(logits: Tensor, target: Tensor) -> dict[str, tuple[float, float]]:
    temperature, lapse = likeliest_pair(logits, target)
    return {
        "likeliest": (best_temperature(Classification(), logits, target)[0], 0.0),
        "robust": (temperature, 0.0),
        "lapse": (temperature, lapse),
    }


def compared(logits: Tensor, target: Tensor, images: Tensor) -> dict[str, dict[str, float]]:
    """All three, in the mean over halvings; `images` says which rows are of one image."""
    found: dict[str, list[dict[str, float]]] = {}
    for split in range(SPLITS):
        generator = torch.Generator().manual_seed(split)
        side = torch.randperm(int(images.max()) + 1, generator=generator)[images] % 2
        parts: dict[str, list[dict]] = {}
        for half in range(2):
            own, other = (side == half).nonzero().flatten(), (side != half).nonzero().flatten()
            for name, chosen in calibrations(logits[:, own], target[own]).items():
                judged = quality(tempered(logits[:, other], *chosen), target[other])
                judged |= {"temperature": chosen[0], "chosen lapse": chosen[1]}
                parts.setdefault(name, []).append(judged)
        for name, halves in parts.items():
            bins = [half.pop("bins") for half in halves]
            mean = {key: (halves[0][key] + halves[1][key]) / 2 for key in halves[0]}
            found.setdefault(name, []).append({**mean, "ece, pooled": pooled_ece(bins)})
    return {
        name: {key: sum(one[key] for one in each) / len(each) for key in each[0]}
        for name, each in found.items()
    }


@torch.no_grad()
def outputs(bnn: BayesianModel, images: Tensor) -> Tensor:
    parts = [torch.cat(list(bnn.outputs(as_inputs(x)))) for x in images.split(250)]
    return torch.cat(parts, dim=1)


def resnet20() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    bnn, _ = fitted(Unit("cifar10-resnet20", "Mixture", 0, "fit"), FULL)
    data = training_batches(f"cifar10:train[:{FULL.train}]")
    rest, _ = hold_out(data, 0)
    used = set(rest.dataset.indices)
    held = [row for row in range(FULL.train) if row not in used]
    images = torch.stack([data.dataset[row][0] for row in held])
    target = torch.tensor([int(data.dataset[row][1]) for row in held])
    with seeded(1):
        augmented = torch.cat([strong(images) for _ in range(AUGMENTATIONS)])
    rows = torch.arange(len(held)).repeat(AUGMENTATIONS)
    yield "mixture", outputs(bnn, augmented), target[rows], rows


def fashion() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    mean, std = FASHION
    data = load_data("fashion-mnist:train", normalise=((mean,), (std,)))
    x, y = (torch.cat(part) for part in zip(*DataLoader(data, batch_size=1000), strict=True))
    train = torch.utils.data.TensorDataset(x[:50_000], y[:50_000])
    network = _trained(train)
    for method in (MAP(), ABNN(), BayesAdapter(), IBNN()):
        bnn = bayesify.convert(network, method)
        if not isinstance(method, MAP):
            loader = DataLoader(train, batch_size=64, shuffle=True)
            bnn.fit(loader, augment="crop-flip", temper=False, progress=False)
        logits = outputs(bnn, x[50_000:])
        yield type(method).__name__, logits, y[50_000:], torch.arange(10_000)


def _trained(train: torch.utils.data.TensorDataset) -> nn.Module:
    torch.manual_seed(0)
    widths = (1, 16, 32, 64)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in pairwise(widths)
    ]
    network = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 9, 10))
    epochs, loader = 8, DataLoader(train, batch_size=128, shuffle=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(crop_and_flip(x)), y).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=("resnet20", "fashion"))
    asked = parser.parse_args().set
    found = {}
    for name, logits, target, images in {"resnet20": resnet20, "fashion": fashion}[asked]():
        with torch.no_grad():
            found[name] = compared(logits.detach(), target, images)
        for rule, figures in found[name].items():
            print(name, rule, {key: round(value, 4) for key, value in figures.items()}, flush=True)
    content = json.loads(FILE.read_text()) if FILE.exists() else {}
    content[asked] = found
    FILE.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
