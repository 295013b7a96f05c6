"""How much of a network needs to be random? ABNN and BayesAdapter on parts of the CIFAR networks.

    BAYESIFY_DATA=../shared/data python benchmarks/partial.py NETWORK METHOD [--fit IMAGES]

NETWORK is resnet20 or resnet56, METHOD abnn or bayes-adapter. Each part of the network is made
random alone; its noise is chosen by the likelihood of 1,000 training images under strong
augmentation, with a temperature of 1, and then it is measured once on the first 3,000 test images
and 1,500 SVHN crops. --fit trains it first, on so many training images, cropped and flipped. Cost
is the time of `predict` on 32 images as a multiple of a plain forward, the median of turns. Writes
benchmarks/results/partial-NETWORK-METHOD.json row by row, and goes on where it was; --table prints
what is there.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, BayesAdapter, BayesianModel, Method
from bayesify.augmentation import strong
from bayesify.batches import Inputs, as_inputs
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, Method] = {"abnn": ABNN(), "bayes-adapter": BayesAdapter()}
FACTORS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # of the method's own noise


def parts(network: nn.Module, method: Method) -> dict[str, Any]:
    """What may be random, by name: late parts of the network, early ones, and every other layer."""
    blocks = len(list(network.get_submodule("layer3").children()))
    last = [f"layer3.{blocks - 1}.*"]
    head = [] if isinstance(method, ABNN) else ["fc.*"]
    every_other = [
        name
        for place, (name, module) in enumerate(
            (n, m) for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)
        )
        if place % 2
    ]
    own = [f"{name}.*" for name in every_other]
    if head:
        own += [name.replace("bn", "conv") + ".*" for name in every_other if "bn" in name]
    found = {
        "last norm": [f"layer3.{blocks - 1}.bn2.*"],
        "last layer": head,
        "last block": last + head,
        "last stage": ["layer3.*", *head],
        "last two stages": ["layer2.*", "layer3.*", *head],
        "everything": None,
        "first norm": ["bn1.*"],
        "first stage": ["bn1.*", "layer1.*"],
        "every other layer": own,
    }
    return {name: where for name, where in found.items() if where != []}


def loader(spec: str) -> DataLoader[Any]:
    return DataLoader(load_data(spec, normalise=CIFAR10_NORMALISATION), batch_size=250)


def judged() -> list[tuple[Inputs, Any]]:
    torch.manual_seed(0)
    return [(as_inputs(strong(x)), y) for x, y in loader("cifar10:train[49000:]")]


def choose_noise(bnn: BayesianModel, batches: list[tuple[Inputs, Any]]) -> dict[str, float]:
    """Walks to the strength at which the judge's NLL is lowest."""
    tried: dict[float, float] = {}
    usual = bnn.method.noise
    for factor in FACTORS:
        bnn.noise = factor * usual
        tried[factor], _ = bnn.judge(batches, draws=bnn.method.draws, seed=0)
        if tried[factor] > min(tried.values()) + 0.02:
            break
    best = min(tried, key=lambda factor: tried[factor])
    bnn.noise = best * usual
    return {"noise": bnn.noise, "judge_nll": tried[best]}


def cost(bnn: BayesianModel, network: nn.Module) -> float:
    x = torch.randn(32, 3, 32, 32)
    ratios = []
    bnn.predict(x)
    with torch.no_grad():
        for _ in range(7):
            started = time.perf_counter()
            network(x)
            middle = time.perf_counter()
            bnn.predict(x)
            ratios.append((time.perf_counter() - middle) / (middle - started))
    return statistics.median(ratios)


def measure(name: str, where: Any, method: Method, network: nn.Module, images: int) -> Any:
    bnn = bayesify.convert(network, method, where=where)
    row: dict[str, Any] = {"random": sum(math.prod(site.shape) for site in bnn.sites)}
    if images:
        fitted = bnn.fit(
            DataLoader(
                load_data(f"cifar10:train[:{images}]", normalise=CIFAR10_NORMALISATION),
                batch_size=128,
                shuffle=True,
            ),
            augment="crop-flip",
            progress=False,
        )
        row["fit"] = str(fitted)
    row |= choose_noise(bnn, judged())
    report = bnn.evaluate(loader("cifar10:test[:3000]"), ood={"svhn": loader("svhn[:1500]")})
    row |= {k: getattr(report, k) for k in ("accuracy", "nll", "ece")}
    row |= {"auroc": report.ood["svhn"].auroc, "cost": round(cost(bnn, network), 2)}
    print(name, row, flush=True)
    return row


def table(rows: dict[str, Any]) -> str:
    lines = ["| random | numbers | accuracy | NLL | ECE | AUROC, SVHN | cost |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['random']:,} | {row['accuracy']:.2%} | {row['nll']:.4f} | "
            f"{row['ece']:.4f} | {row['auroc']:.4f} | {row['cost']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--fit", type=int, default=0, metavar="IMAGES")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    fitted = f"-fit{arguments.fit}" if arguments.fit else ""
    file = RESULTS / f"partial-{arguments.network}-{arguments.method}{fitted}.json"
    results = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    if not arguments.table:
        network, method = load_model(f"cifar10-{arguments.network}"), METHODS[arguments.method]
        results |= {
            "command": f"python benchmarks/partial.py {arguments.network} {arguments.method}"
            + (f" --fit {arguments.fit}" if arguments.fit else ""),
            "method": repr(method),
            "threads": torch.get_num_threads(),
        }
        for name, where in parts(network, method).items():
            if name not in results["rows"]:
                row = measure(name, where, method, network, arguments.fit)
                results["rows"][name] = row
                file.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results["rows"]))


if __name__ == "__main__":
    main()
