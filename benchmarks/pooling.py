"""How draws are pooled and tempered. By training images: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.pooling SET

Four calibrations of the same draws, chosen by likelihood on one half of a set and measured on the
other, both ways round, in the mean of ten ways to halve it:

    draws tempered      the mean of softmax(z_s / T)
    wrong labels        the same, if any label may be wrong: (1 - lapse) p + lapse / classes
    average tempered    the mean of softmax(z_s), to the power 1/T: what `fit` and `calibrate` do
    logits              the mean of log softmax(z_s), over T

SET is resnet20 or resnet56 (the mixture of `make bench-quality`, seed 0, with the noise of
training, draws mirrored and not, on two strong augmentations of the 2,000 training images that its
fit held out; halves have different images) or fashion (a small network trained on 50,000 training
images of Fashion-MNIST, and ABNN, BayesAdapter and iBNN of it, on the other 10,000 as they are).
AUROC is how well predictive entropy tells them from sets that are in no other table here: training
images made strange (see abnn_share.py), letters, clothes, faces and streets; for fashion, letters.
Adds to benchmarks/results/pooling.json.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, BayesianModel
from bayesify.augmentation import Augment, crop_and_flip, strong
from bayesify.batches import as_inputs
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.evaluation.detection import auroc
from bayesify.validation import hold_out, seeded
from benchmarks.abnn_share import made_strange
from benchmarks.quality.headline import fitted
from benchmarks.quality.labels import training_batches
from benchmarks.quality.measures import entropy, pooled_ece, quality
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import FULL
from benchmarks.quality.units import Unit

FILE = RESULTS / "pooling.json"
AUGMENTATIONS, SPLITS, STRANGE = 2, 10, 500
FASHION = ((0.286,), (0.353,))  # mean and standard deviation of its pixels
LETTERS, CLOTHES = f"notmnist[:{STRANGE}]", f"fashion-mnist:test[:{STRANGE}]"

Rule = Callable[..., Tensor]  # of draws, temperature and, for one, a lapse
Sets = Iterator[tuple[str, Tensor, Tensor, Tensor, dict[str, Tensor]]]


def draws_tempered(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).softmax(2).mean(0)


def wrong_labels(logits: Tensor, temperature: float, lapse: float) -> Tensor:
    lapse = lapse / 1000 / (1 + lapse / 1000)  # the search begins at 1
    return (1 - lapse) * draws_tempered(logits, temperature) + lapse / logits.shape[2]


def average_tempered(logits: Tensor, temperature: float) -> Tensor:
    return (logits.softmax(2).mean(0).clamp_min(1e-37).log() / temperature).softmax(1)


def pooled_logits(logits: Tensor, temperature: float) -> Tensor:
    return (logits.log_softmax(2).mean(0) / temperature).softmax(1)


RULES: dict[str, tuple[Rule, int]] = {  # with how many numbers to choose
    "draws tempered": (draws_tempered, 1),
    "wrong labels": (wrong_labels, 2),
    "average tempered": (average_tempered, 1),
    "logits": (pooled_logits, 1),
}


def calibrated(rule: Rule, count: int, logits: Tensor, target: Tensor) -> list[float]:
    """The likeliest numbers of a rule."""

    def loss(logs: list[float]) -> float:
        return losses(rule(logits, *map(math.exp, logs)), target).mean().item()

    options = {"xatol": 0.005, "fatol": 1e-6}
    found = minimize(loss, [0.0] * count, method="Nelder-Mead", options=options)
    return [math.exp(log) for log in found.x]


def losses(probs: Tensor, target: Tensor) -> Tensor:
    return -probs[torch.arange(len(target)), target].clamp_min(1e-37).log()


def half_by_half(
    logits: Tensor, target: Tensor, side: Tensor, strange: dict[str, Tensor]
) -> dict[str, list[dict[str, Any]]]:
    """What every rule comes to on each half, chosen on the other."""
    found: dict[str, list[dict[str, Any]]] = {}
    for half in range(2):
        own, other = (side == half).nonzero().flatten(), (side != half).nonzero().flatten()
        own_logits, other_logits = logits[:, own], logits[:, other]
        for name, (rule, count) in RULES.items():
            numbers = calibrated(rule, count, own_logits, target[own])
            probs = rule(other_logits, *numbers)
            told = [auroc(entropy(probs), entropy(rule(x, *numbers))) for x in strange.values()]
            judged = quality(probs, target[other])
            judged |= {"auroc": statistics.mean(told), "temperature": numbers[0]}
            found.setdefault(name, []).append(judged)
    return found


@torch.no_grad()
def compared(
    logits: Tensor, target: Tensor, images: Tensor, strange: dict[str, Tensor]
) -> dict[str, dict[str, float]]:
    """All rules, in the mean over halvings; `images` says which rows are of one image."""
    found: dict[str, list[dict[str, float]]] = {}
    for split in range(SPLITS):
        generator = torch.Generator().manual_seed(split)
        side = torch.randperm(int(images.max()) + 1, generator=generator)[images] % 2
        for name, halves in half_by_half(logits, target, side, strange).items():
            bins = [half.pop("bins") for half in halves]
            mean = {key: (halves[0][key] + halves[1][key]) / 2 for key in halves[0]}
            found.setdefault(name, []).append({**mean, "ece, pooled": pooled_ece(bins)})
    return {
        name: {key: statistics.mean(one[key] for one in each) for key in each[0]}
        for name, each in found.items()
    }


@torch.no_grad()
def outputs(bnn: BayesianModel, images: Tensor) -> Tensor:
    parts = [torch.cat(list(bnn.outputs(as_inputs(x)))) for x in images.split(250)]
    return torch.cat(parts, dim=1)


def resnet(name: str) -> Sets:
    bnn, _ = fitted(Unit(f"cifar10-{name}", "Mixture", 0, "fit"), FULL)
    bnn.noise = bnn.method.noise
    data: Any = training_batches(f"cifar10:train[:{FULL.train}]")
    rest: Any = hold_out(data, 0)[0]
    held = sorted(set(range(FULL.train)) - set(rest.dataset.indices))
    images = torch.stack([data.dataset[row][0] for row in held])
    target = torch.tensor([int(data.dataset[row][1]) for row in held])
    with seeded(1):
        augmented = torch.cat([strong(images) for _ in range(AUGMENTATIONS)])
    rows = torch.arange(len(held)).repeat(AUGMENTATIONS)
    strange = {
        **{kind: x[:STRANGE] for kind, x in made_strange(0).items()},
        "letters": coloured(LETTERS),
        "clothes": coloured(CLOTHES),
        "faces": coloured("faces"),
        "streets": coloured("camvid:train[:200]"),
    }
    for bnn.mirrored in (True, False):
        told = {kind: outputs(bnn, x) for kind, x in strange.items()}
        about = "mirrored" if bnn.mirrored else "none mirrored"
        yield about, outputs(bnn, augmented), target[rows], rows, told


def coloured(spec: str) -> Tensor:
    """Images as those of CIFAR-10 are: square, 32 pixels, three channels."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CIFAR10_NORMALISATION)
    data: Any = load_data(spec)
    found = []
    for row in range(len(data)):
        image = data[row][0]
        side = min(image.shape[1:])
        found.append(
            functional.interpolate(
                image[None, :, :side, :side], (32, 32), mode="bilinear", antialias=True
            )[0].expand(3, -1, -1)
        )
    return (torch.stack(found) - mean) / std


def fashion(_name: str) -> Sets:
    data: Any = load_data("fashion-mnist:train", normalise=FASHION)
    x, y = (torch.cat(part) for part in zip(*DataLoader(data, batch_size=1000), strict=True))
    letters: Any = load_data(LETTERS, normalise=FASHION)
    strange = torch.stack([letters[row][0] for row in range(len(letters))])
    train = TensorDataset(x[:50_000], y[:50_000])
    network = trained(train)
    for method in (ABNN(), BayesAdapter(), IBNN()):
        bnn = bayesify.convert(network, method)
        loader = DataLoader(train, batch_size=64, shuffle=True)
        bnn.fit(loader, augment="crop-flip", temper=False, progress=False)
        told = {"letters": outputs(bnn, strange)}
        logits = outputs(bnn, x[50_000:])
        yield type(method).__name__, logits, y[50_000:], torch.arange(10_000), told


def trained(
    train: TensorDataset,
    widths: tuple[int, ...] = (16, 32, 64),
    epochs: int = 8,
    augment: Augment = crop_and_flip,
    seed: int = 0,
) -> nn.Module:
    """A small network, always the same."""
    torch.manual_seed(seed)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in pairwise((1, *widths))
    ]
    network = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(widths[-1] * 9, 10))
    loader = DataLoader(train, batch_size=128, shuffle=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(network(augment(x)), y).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


SETS: dict[str, Callable[[str], Sets]] = {
    "resnet20": resnet,
    "resnet56": resnet,
    "fashion": fashion,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=SETS)
    asked = parser.parse_args().set
    found = {}
    for name, *given in SETS[asked](asked):
        found[name] = compared(*given)
        for rule, figures in found[name].items():
            print(name, rule, {key: round(value, 4) for key, value in figures.items()}, flush=True)
    content = json.loads(FILE.read_text()) if FILE.exists() else {}
    content[asked] = found
    FILE.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
