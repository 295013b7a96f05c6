"""What a training step of each method costs, as a multiple of a plain one of the same network.

    python benchmarks/training_steps.py [NETWORK ...] [--repeats 9]

Steps of `fit` and plain steps (SGD on all weights, in training mode) run in turns on the same
random batch; the ratio is that of the medians. Networks are resnet20, resnet18 and vit-tiny, all
unless told. Writes benchmarks/results/training_steps.json, network by network.
Needs timm for ViT-tiny and torchvision for ResNet-18 (32 px stem: 3 x 3 convolution, no pooling).
ViT-tiny has no row with a draw for each example: attention has no batching rule, so that vmap loops
over the examples.
"""

import argparse
import dataclasses
import json
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, BayesifyWarning, Method
from bayesify.zoo import CifarResNet

FILE = Path(__file__).parent / "results" / "training_steps.json"
STEPS = 6
EXEMPLAR = "BayesAdapter, a draw for each example"


def resnet18() -> nn.Module:
    import torchvision

    network = torchvision.models.resnet18(num_classes=10)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def vit_tiny() -> nn.Module:
    import timm

    network: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    return network


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], int, int]] = {
    "resnet20": ("ResNet-20, 32 px, batch 64", lambda: CifarResNet(3), 64, 32),
    "resnet18": ("ResNet-18, 32 px, batch 16", resnet18, 16, 32),
    "vit-tiny": ("ViT-tiny, 224 px, batch 16", vit_tiny, 16, 224),
}


def timed(method: Method, times: list[float]) -> Method:
    """The same method, noting when each of its steps ends."""

    def after_step(*_: Any) -> None:
        times.append(time.perf_counter())

    kind = type(type(method).__name__, (type(method),), {"after_step": after_step})
    made: Method = dataclasses.replace(kind(**method.to_dict()))
    return made


def bayesian_steps(
    network: nn.Module, method: Method, x: Tensor, y: Tensor, groups: int | None
) -> list[float]:
    """Seconds of single steps of `fit`, the first left out."""
    times: list[float] = []
    bnn = bayesify.convert(network, timed(method, times))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesifyWarning)
        bnn.fit(
            [(x, y)] * STEPS,
            validation=[(x[:2], y[:2])],
            epochs=1,
            validations=1,
            temper=False,
            progress=False,
            groups=groups,
        )
    return [b - a for a, b in pairwise(times)]


def plain_steps(network: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Seconds of ordinary training steps."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9, nesterov=True)
    times = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter())
    network.eval()
    return [b - a for a, b in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", default=[])
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    repeats = asked.repeats
    methods: dict[str, tuple[Method, int | None, int]] = {
        "ABNN, one member": (ABNN(members=1), None, 1),
        "BayesAdapter, default choice": (BayesAdapter(), None, 1),
        EXEMPLAR: (BayesAdapter(adapt_statistics=False), None, 1),
        "BayesAdapter, 4 groups": (BayesAdapter(), 4, 1),
        "iBNN, one draw": (IBNN(samples=1), None, 1),
        "iBNN, two draws": (IBNN(samples=2), None, 2),
    }
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for network_name in asked.networks or NETWORKS:
        title, build, batch, pixels = NETWORKS[network_name]
        torch.manual_seed(0)
        network = build().eval()
        x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 10, (batch,))
        left_out = EXEMPLAR if network_name == "vit-tiny" else ""
        times: dict[str, list[float]] = {"plain": []}
        times |= {name: [] for name in methods if name != left_out}
        for _ in range(repeats):
            times["plain"] += plain_steps(network, x, y)
            for name in list(times)[1:]:
                method, groups, _draws = methods[name]
                times[name] += bayesian_steps(network, method, x, y, groups)
        plain = statistics.median(times["plain"])
        rows = {}
        for name, seconds in times.items():
            draws = methods[name][2] if name in methods else 1
            quartiles = statistics.quantiles(seconds, n=4)
            rows[name] = {
                "seconds": statistics.median(seconds),
                "ratio": statistics.median(seconds) / plain,
                "ratio_a_draw": statistics.median(seconds) / plain / draws,
                "quartiles": [value / plain for value in (quartiles[0], quartiles[2])],
            }
            print(f"{title}: {name}: {rows[name]['ratio']:.2f} x", flush=True)
        results[title] = {
            "command": f"python benchmarks/training_steps.py {network_name} --repeats {repeats}",
            "threads": torch.get_num_threads(),
            "steps": rows,
        }
        FILE.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
