"""How draws are pooled and tempered. By training images: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.pooling SET

Calibrations of the same draws, chosen by likelihood on one half of a set and measured on the other,
both ways round, in the mean of ten ways to halve it:

    draws tempered      the mean of softmax(z_s / T)
    wrong labels        the same, if any label may be wrong: (1 - lapse) p + lapse / classes
    average tempered    the mean of softmax(z_s), to the power 1/T: what `fit` does
    by doubt            the same, where T (1 + H)^slope takes the place of T, H being the entropy of
                        that mean; `by doubt, steep` has (0.1 + H), as has `calibrate`
    logits              the mean of log softmax(z_s), over T

SET is resnet20 or resnet56 (the mixture of `make bench-quality`, seed 0, with the noise of
training, draws mirrored and not, on two strong augmentations of the 2,000 training images that its
fit held out; halves have different images), fashion (a small network trained on 50,000 training
images of Fashion-MNIST, and ABNN, BayesAdapter and iBNN of it, on the other 10,000 as they are),
by-heart-N (a larger network that knows 20,000 of them by heart, that of benchmarks/temperature.py
with seed N, and the mixture of it too, as fitted, on the same 10,000) or cifar10 (a ResNet-20
trained by us on 40,000 training images, and mirroring, ABNN and the mixture of it, on the others).
AUROC is how well predictive entropy tells them from sets that are in no other table here: training
images made strange (see abnn_share.py), letters, clothes, faces and streets; for fashion, letters.
Adds to benchmarks/results/pooling.json.

Written before `cifar10` and, with these rules, `fashion` were run: `calibrate` will temper by doubt
if, in the mean of what is made of a network on cifar10, NLL and the pooled ECE are lower than with
one temperature and AUROC is lower by no more than 0.005, and on fashion NLL and pooled ECE are no
higher by more than 0.0005; with (1 + H) or (0.1 + H), whichever is likelier in the mean of both.
It did not come to that: both were the same to 0.0001. `by-heart-1` was added afterwards, because
the checkpoints know their images by heart and these two networks do not. Written before its first
result: `calibrate` will temper by doubt if in the mean of the four methods NLL is lower by 0.0003
or more, pooled ECE is lower, and AUROC is lower by no more than 0.005. It was 0.0002 and 0.00026.
Written before `by-heart-2` and `by-heart-3` were run: the same criterion, in the mean of all three,
says whether it should be taken after all. It should.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, BayesianModel, Method, Mixture
from bayesify.augmentation import Augment, crop_and_flip, strong
from bayesify.batches import as_inputs
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.evaluation.detection import auroc
from bayesify.validation import hold_out, seeded
from bayesify.zoo import load_model
from benchmarks.abnn_share import made_strange
from benchmarks.quality.headline import CACHE, fitted
from benchmarks.quality.labels import training_batches
from benchmarks.quality.measures import entropy, pooled_ece, quality
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import FULL, METHODS
from benchmarks.quality.units import Unit

FILE = RESULTS / "pooling.json"
AUGMENTATIONS, SPLITS, STRANGE = 2, 10, 500
FASHION = ((0.286,), (0.353,))  # mean and standard deviation of its pixels
LETTERS, CLOTHES = f"notmnist[:{STRANGE}]", f"fashion-mnist:test[:{STRANGE}]"
STREETS = "camvid:train[:200]"
SEEN, PASSES = 40_000, 30  # of our own ResNet-20

Rule = Callable[..., Tensor]  # of draws, temperature and, for one, a lapse
Sets = Iterator[tuple[str, Tensor, Tensor, Tensor, dict[str, Tensor]]]


def draws_tempered(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).softmax(2).mean(0)


def wrong_labels(logits: Tensor, temperature: float, lapse: float) -> Tensor:
    lapse = lapse / 1000 / (1 + lapse / 1000)  # the search begins at 1
    return (1 - lapse) * draws_tempered(logits, temperature) + lapse / logits.shape[2]


def average_tempered(logits: Tensor, temperature: float) -> Tensor:
    return (logits.softmax(2).mean(0).clamp_min(1e-37).log() / temperature).softmax(1)


def by_doubt(logits: Tensor, temperature: float, steepness: float, least: float = 1.0) -> Tensor:
    probs = logits.softmax(2).mean(0)
    hotter = (least + entropy(probs).float().unsqueeze(1)) ** math.log(steepness)
    return (probs.clamp_min(1e-37).log() / (temperature * hotter)).softmax(1)


def pooled_logits(logits: Tensor, temperature: float) -> Tensor:
    return (logits.log_softmax(2).mean(0) / temperature).softmax(1)


RULES: dict[str, tuple[Rule, int]] = {  # with how many numbers to choose
    "draws tempered": (draws_tempered, 1),
    "wrong labels": (wrong_labels, 2),
    "average tempered": (average_tempered, 1),
    "by doubt": (by_doubt, 2),
    "by doubt, steep": (partial(by_doubt, least=0.1), 2),
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
    strange = {**{kind: x[:STRANGE] for kind, x in made_strange(0).items()}, **other_things()}
    for bnn.mirrored in (True, False):
        told = {kind: outputs(bnn, x) for kind, x in strange.items()}
        about = "mirrored" if bnn.mirrored else "none mirrored"
        yield about, outputs(bnn, augmented), target[rows], rows, told


def other_things() -> dict[str, Tensor]:
    specs = {"letters": LETTERS, "clothes": CLOTHES, "faces": "faces", "streets": STREETS}
    return {kind: coloured(spec) for kind, spec in specs.items()}


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


def fashion(name: str) -> Sets:
    data: Any = load_data("fashion-mnist:train", normalise=FASHION)
    x, y = (torch.cat(part) for part in zip(*DataLoader(data, batch_size=1000), strict=True))
    letters: Any = load_data(LETTERS, normalise=FASHION)
    strange = torch.stack([letters[row][0] for row in range(len(letters))])
    methods: tuple[Method, ...] = (ABNN(), BayesAdapter(), IBNN())
    train, seed = TensorDataset(x[:50_000], y[:50_000]), 0
    if by_heart := name.startswith("by-heart"):
        train, seed = TensorDataset(x[:20_000], y[:20_000]), int(name[-1])
        network = trained(train, (32, 64, 128), 40, Tensor.clone, seed)
        methods += (Mixture(),)
    else:
        network = trained(train)
    for method in methods:
        bnn = bayesify.convert(network, method)
        loader = DataLoader(train, batch_size=64, shuffle=True)
        bnn.fit(loader, augment="crop-flip", temper=by_heart, seed=seed, progress=False)
        told = {"letters": outputs(bnn, strange)}
        logits = outputs(bnn, x[50_000:])
        yield type(method).__name__, logits, y[50_000:], torch.arange(10_000), told


def cifar10(_name: str) -> Sets:
    data: Any = load_data("cifar10:train", normalise=CIFAR10_NORMALISATION)
    x, y = (torch.cat(part) for part in zip(*DataLoader(data, batch_size=1000), strict=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100))
    train = TensorDataset(x[order[:SEEN]], y[order[:SEEN]])
    network = trained_resnet20(train)
    unseen, target = x[order[SEEN:]], y[order[SEEN:]]
    strange = other_things()
    for name in ("Mirroring", "ABNN", "Mixture"):
        bnn = bayesify.convert(network, METHODS[name])
        loader = DataLoader(train, batch_size=64, shuffle=True)
        bnn.fit(loader, augment="crop-flip", precision="bf16", progress=False)
        told = {kind: outputs(bnn, each) for kind, each in strange.items()}
        yield name, outputs(bnn, unseen), target, torch.arange(len(unseen)), told


def trained_resnet20(train: TensorDataset) -> nn.Module:
    """Trained from scratch with crops and mirrored images, in some twenty minutes; kept."""
    network = load_model("cifar10-resnet20").train()
    file = CACHE / "resnet20-on-40000.safetensors"
    if file.exists():
        network.load_state_dict(load_file(file))
        return network.eval()
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    network.requires_grad_(True).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    loader = DataLoader(train, batch_size=128, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, PASSES * len(loader))
    for _ in range(PASSES):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                logits = network(crop_and_flip(x).to(memory_format=torch.channels_last))
            optimizer.zero_grad()
            functional.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            schedule.step()
    CACHE.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, file)
    return network.eval()


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
    **{f"by-heart-{seed}": fashion for seed in (1, 2, 3)},
    "cifar10": cifar10,
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
