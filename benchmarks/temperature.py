"""Which temperature a fit ends with. By training images: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.temperature [--plain] [--seeds 0]

A fit without validation data asks strongly augmented training images for a temperature. They are
strange, which makes a network less right, and the network knows them, which makes it more right
than it will be: what they ask for may be wrong either way. So a small network is trained on 20,000
images of Fashion-MNIST, with crops and mirrored images, which it does not come to know by heart, or
on the images as they are (`--plain`), which it does, and made Bayesian as usual. The temperature is
judged by 10,000 images that nothing has seen:

    likeliest    by 2,000 of the training images under strong augmentation
    fit          what `fit` ends with, see bayesify/ending.py
    unseen       the likeliest by the images that judge: what could be had

Adds to benchmarks/results/temperature.json, by training and seed, of network and fit alike.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP
from bayesify.augmentation import crop_and_flip
from bayesify.data import load_data
from bayesify.evaluation.detection import auroc
from bayesify.validation import hold_out
from benchmarks.pooling import FASHION, LETTERS, trained
from benchmarks.quality.measures import entropy, quality
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import METHODS

FILE = RESULTS / "temperature.json"
TRAINED, UNSEEN = 20_000, 10_000
WIDTHS, EPOCHS = (32, 64, 128), 40
GRID = [2 ** (step / 32) for step in range(-64, 65)]


def tempered(probs: Tensor, temperature: float) -> Tensor:
    return (probs.clamp_min(1e-37).log() / temperature).softmax(1)


def losses(probs: Tensor, target: Tensor, temperature: float) -> Tensor:
    return functional.nll_loss(tempered(probs, temperature).log(), target, reduction="none")


def likeliest(probs: Tensor, target: Tensor) -> float:
    return min(GRID, key=lambda t: losses(probs, target, t).mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    data: Any = load_data("fashion-mnist:train", normalise=FASHION)
    x, y = (torch.cat(part) for part in zip(*DataLoader(data, batch_size=1000), strict=True))
    letters: Any = load_data(LETTERS, normalise=FASHION)
    strange = torch.stack([letters[row][0] for row in range(len(letters))])
    train = TensorDataset(x[:TRAINED], y[:TRAINED])
    unseen, target = x[-UNSEEN:], y[-UNSEEN:]
    for seed in given.seeds:
        augment = Tensor.clone if given.plain else crop_and_flip
        network = trained(train, WIDTHS, EPOCHS, augment, seed)
        with torch.no_grad():
            parts = [(network(a).argmax(1) == b).float() for a, b in DataLoader(train, 1000)]
        found: dict[str, Any] = {"right on training images": torch.cat(parts).mean().item()}
        print(found, flush=True)
        for name, method in METHODS.items():
            if type(method) is MAP:
                continue  # calibrated, it is Temperature
            loader = DataLoader(train, batch_size=64, shuffle=True)
            bnn = bayesify.convert(network, method)
            bnn.fit(loader, augment="crop-flip", seed=seed, progress=False)
            rules = {"fit": bnn.temperature}
            bnn.temperature = 1.0
            held = hold_out(loader, seed)[1]
            probs = torch.cat([bnn.predict(inputs, seed=seed).probs for inputs, _ in held.batches])
            labels = torch.cat([torch.as_tensor(each) for _, each in held.batches])
            others, judged = (bnn.predict(each, seed=seed).probs for each in (strange, unseen))
            rules |= {"likeliest": likeliest(probs, labels), "unseen": likeliest(judged, target)}
            found[name] = {}
            for rule, t in rules.items():
                ours, theirs = tempered(judged, t), tempered(others, t)
                row = {"temperature": t, **quality(ours, target)}
                row.pop("bins")
                row["auroc"] = auroc(entropy(ours), entropy(theirs))
                found[name][rule] = row
                print(name, rule, {k: round(v, 4) for k, v in row.items()}, flush=True)
        content = json.loads(FILE.read_text()) if FILE.exists() else {}
        content[f"{'plain' if given.plain else 'crop-flip'}, seed {seed}"] = found
        FILE.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
