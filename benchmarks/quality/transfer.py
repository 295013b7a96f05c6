"""What happens when the checkpoint is a poor match: the trunk of CIFAR-10, a head for CIFAR-100.

The head is a logistic regression on the trunk's features of 4,000 images, 40 a class. From there
each method goes on with the same images, and is measured on the other 1,000.
"""

from typing import Any

import torch
from torch import nn

from bayesify.zoo import load_model
from benchmarks.quality.headline import fit_or_load
from benchmarks.quality.labels import batches, images, test_data, training_data
from benchmarks.quality.measures import detection, quality
from benchmarks.quality.settings import (
    METHODS,
    TRANSFER_FIT,
    TRANSFER_SHARE,
    Size,
)
from benchmarks.quality.units import Unit

CLASSES = 100
WEIGHT_DECAY = 1e-3
OTHERS = ("svhn", "textures")


def transfer(unit: Unit, size: Size) -> dict[str, Any]:
    """Measures of a method on classes that the trunk has never seen."""
    train = int(TRANSFER_SHARE * size.other)
    known, unknown = f"cifar100[:{train}]", f"cifar100[{train}:{size.other}]"
    model = with_new_head(load_model("cifar10-resnet20"), known)
    bnn, found = fit_or_load(model, METHODS[unit.method], known, TRANSFER_FIT, unit)
    data = test_data(unknown, unit.name)
    probs = bnn.predict(batches(data), seed=unit.seed).probs
    others = {
        name: bnn.predict(batches(images(f"{name}[:{size.few}]")), seed=unit.seed).probs
        for name in OTHERS
    }
    return {
        **found,
        **quality(probs, data.tensors[1]),
        "ood": detection(probs, others),
        "images": len(data),
        "draws": bnn.method.draws,
        "noise": bnn.noise,
        "temperature": bnn.temperature,
    }


def with_new_head(model: nn.Module, split: str) -> nn.Module:
    """The network with a linear layer that was fitted to other classes, always the same."""
    model.fc = nn.Identity()
    with torch.no_grad():
        parts = [(model(x), y) for x, y in batches(training_data(split))]
    features, target = (torch.cat(part) for part in zip(*parts, strict=True))
    head = nn.Linear(features.shape[1], CLASSES)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(head(features), target)
        value = value + WEIGHT_DECAY / 2 * head.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    model.fc = head.requires_grad_(False)
    return model
