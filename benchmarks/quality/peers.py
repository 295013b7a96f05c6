"""Other libraries on the same network and data, with the same measures.

They are installed by `make bench-quality` (benchmarks/requirements.txt), and imported where used.
Each function fits and returns how to predict a batch, and how many draws that takes. Images are in
the order that the library is fastest in on processors: channels last, as for ours, but for torch-
uncertainty, which draws noise for every pixel and does that several times faster in torch's own
order.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from bayesify.augmentation import crop_and_flip
from bayesify.tape import channels_last
from bayesify.zoo import load_model
from benchmarks.quality.headline import UNTIMED
from benchmarks.quality.labels import batches, images, test_data, training_data
from benchmarks.quality.measures import detection, quality
from benchmarks.quality.settings import BATCH, OTHERS, PEERS, Size
from benchmarks.quality.units import Unit

CLASSES = 10
Predict = Callable[[Tensor], Tensor]


def peer(unit: Unit, size: Size) -> dict[str, Any]:
    """Fits on training data, measures on all test images."""
    torch.manual_seed(unit.seed)
    data = training_data(f"cifar10:train[:{size.train}]")
    started = time.monotonic()
    predict, draws = FITS[unit.method](load_model(unit.network), data, **PEERS[unit.method])
    fit_seconds = None if UNTIMED else time.monotonic() - started

    @torch.no_grad()
    def predict_all(x: Tensor) -> Tensor:
        return torch.cat([predict(channels_last(part)).detach() for (part,) in batches(x)])

    x, y = test_data(f"cifar10:test[:{size.test}]", unit.name).tensors
    started = time.monotonic()
    probs = predict_all(x)
    predict_ms = None if UNTIMED else 1000 * (time.monotonic() - started) / len(y)
    others = {name: predict_all(images(f"{name}[:{size.other}]")) for name in OTHERS}
    return {
        **quality(probs, y),
        "ood": detection(probs, others),
        "images": len(y),
        "fit_seconds": fit_seconds,
        "predict_ms": predict_ms,
        "draws": draws,
    }


def laplace_torch(
    model: nn.Module, data: Any, hessian_structure: str
) -> tuple[Predict, int | None]:
    """A Gaussian over the last layer; prior by marginal likelihood, predictions by probit."""
    from laplace import Laplace

    posterior = Laplace(
        model,
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=hessian_structure,
    )
    posterior.fit(batches(data, BATCH))
    posterior.optimize_prior_precision(method="marglik")
    return posterior, None


def torch_uncertainty_abnn(
    model: nn.Module, data: Any, **settings: Any
) -> tuple[Predict, int | None]:
    """Their ABNN, as its authors train it: norm statistics follow the training images."""
    from torch_uncertainty.post_processing.abnn import ABNN

    theirs = ABNN(num_classes=CLASSES, device="cpu", model=model, **settings)
    theirs.fit(augmented(data, torch.contiguous_format))
    theirs.eval()
    copies = settings["num_models"] * settings["num_samples"]

    def predict(x: Tensor) -> Tensor:
        logits = theirs(x.contiguous())  # of each copy in turn, one below the other
        return logits.view(copies, len(x), CLASSES).softmax(2).mean(0)

    return predict, copies


def ivon_opt(
    model: nn.Module, data: Any, lr: float, ess: int, draws: int
) -> tuple[Predict, int | None]:
    """Variational fine-tuning of all weights; the rate falls as a cosine."""
    from ivon import IVON

    loader = augmented(data)
    optimizer = IVON(model.parameters(), lr=lr, ess=ess)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / len(loader))) / 2
    )
    for x, y in loader:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()

    def predict(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), CLASSES)
        for _ in range(draws):
            with optimizer.sampled_params():
                total += model(x).softmax(1)
        return total / draws

    return predict, draws


def augmented(data: Any, order: torch.memory_format = torch.channels_last) -> DataLoader[Any]:
    """Training batches, cropped and flipped as ours are."""

    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = default_collate(items)
        return crop_and_flip(x).contiguous(memory_format=order), y

    return DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)


FITS: dict[str, Callable[..., tuple[Predict, int | None]]] = {
    "laplace-torch-kron": laplace_torch,
    "laplace-torch-full": laplace_torch,
    "torch-uncertainty-ABNN": torch_uncertainty_abnn,
    "ivon-opt": ivon_opt,
}
