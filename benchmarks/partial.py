"""How much of a network needs to be random? ABNN and BayesAdapter on parts of the CIFAR networks.

    BAYESIFY_DATA=../shared/data python benchmarks/partial.py NETWORK METHOD [--fit IMAGES]

NETWORK is resnet20 or resnet56, METHOD abnn or bayes-adapter. Each part of the network is made
random alone; noise and temperature are calibrated on 1,000 training images under strong
augmentation, and then it is measured once on the first 3,000 test images and 1,500 SVHN crops, all
with 12 draws. --fit trains it first, on so many training images, cropped and flipped. Cost, which
--costs measures afterwards for all rows, is the time of `predict` on 32 images as a multiple of a
plain forward, the median of turns. Writes
benchmarks/results/partial-NETWORK-METHOD.json row by row, and goes on where it was; --table prints
what is there, and --plot draws docs/images/partial.png from all of them.
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
from bayesify import ABNN, BayesAdapter, BayesianModel, Method, Temperature
from bayesify.augmentation import strong
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, Method] = {"abnn": ABNN(draws=12), "bayes-adapter": BayesAdapter(draws=12)}
NOTHING = "nothing, a temperature alone"


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
        NOTHING: None,
        "last norm": [f"layer3.{blocks - 1}.bn2.*"],
        "last layer": head,
        "last block": last + head,
        "last stage": ["layer3.*", *head],
        "last two stages": ["layer2.*", "layer3.*", *head],
        "everything": 1.0,
        "first norm": ["bn1.*"],
        "first stage": ["bn1.*", "layer1.*"],
        "every other layer": own,
    }
    return {name: where for name, where in found.items() if where != []}


def loader(spec: str) -> DataLoader[Any]:
    return DataLoader(load_data(spec, normalise=CIFAR10_NORMALISATION), batch_size=250)


def judged() -> list[Any]:
    torch.manual_seed(0)
    return [(strong(x), y) for x, y in loader("cifar10:train[49000:]")]


def made(name: str, where: Any, method: Method, network: nn.Module) -> BayesianModel:
    if name == NOTHING:
        return bayesify.convert(network, Temperature())
    return bayesify.convert(network, method, where=where)


def cost(bnn: BayesianModel, network: nn.Module) -> float:
    """What a prediction takes, as a multiple of a plain forward; at noise 0 it would run less."""
    x = torch.randn(32, 3, 32, 32)
    ratios = []
    bnn.predict(x)
    with torch.no_grad():
        for _ in range(15):
            started = time.perf_counter()
            network(x)
            middle = time.perf_counter()
            bnn.predict(x)
            ratios.append((time.perf_counter() - middle) / (middle - started))
    return statistics.median(ratios)


def measure(name: str, where: Any, method: Method, network: nn.Module, images: int) -> Any:
    bnn = made(name, where, method, network)
    row: dict[str, Any] = {"random": sum(math.prod(site.shape) for site in bnn.sites)}
    if images:
        fitted = bnn.fit(
            DataLoader(
                load_data(f"cifar10:train[:{images}]", normalise=CIFAR10_NORMALISATION),
                batch_size=128,
                shuffle=True,
            ),
            augment="crop-flip",
            mirror=False,  # which is for networks that are random throughout
            progress=False,
        )
        row["fit"] = str(fitted)
    found = bnn.calibrate(judged())
    row |= {"noise": found.noise, "temperature": found.temperature, "judge_nll": found.nll}
    report = bnn.evaluate(loader("cifar10:test[:3000]"), ood={"svhn": loader("svhn[:1500]")})
    row |= {k: getattr(report, k) for k in ("accuracy", "nll", "ece")}
    row |= {"auroc": report.ood["svhn"].auroc}
    print(name, row, flush=True)
    return row


def table(rows: dict[str, Any]) -> str:
    lines = ["| random | numbers | accuracy | NLL | ECE | AUROC, SVHN | cost |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['random']:,} | {row['accuracy']:.2%} | {row['nll']:.4f} | "
            f"{row['ece']:.4f} | {row['auroc']:.4f} | {row.get('cost', math.nan):.1f} |"
        )
    return "\n".join(lines)


def draw(file: Path) -> None:
    """NLL and AUROC against what a prediction costs, for all that has been run untrained."""
    import matplotlib.pyplot as plt

    names = [f"{network}-{method}" for network in ("resnet20", "resnet56") for method in METHODS]
    done = [name for name in names if (RESULTS / f"partial-{name}.json").exists()]
    figure, axes = plt.subplots(
        2, len(done), figsize=(4.2 * len(done), 7), layout="constrained", squeeze=False
    )
    labels = {"nll": "test NLL (nats)", "auroc": "AUROC, SVHN"}
    for column, name in zip(axes.T, done, strict=True):
        rows = json.loads((RESULTS / f"partial-{name}.json").read_text())["rows"]
        for ax, (measured, label) in zip(column, labels.items(), strict=True):
            for part, row in rows.items():
                plain = part == NOTHING
                ax.scatter(
                    row["cost"], row[measured], marker="s" if plain else "o",
                    color="#D55E00" if plain else "#0072B2",
                )  # fmt: skip
            ax.set(xlabel="cost of 12 draws (plain forwards)", ylabel=label, xscale="log")
            ax.margins(x=0.3, y=0.18)
            ax.grid(alpha=0.3)
            places = {part: (row["cost"], row[measured]) for part, row in rows.items()}
            for part, (offset, side) in labels_apart(ax, figure, places).items():
                ax.annotate(
                    part.partition(",")[0], places[part], offset, ha=side, fontsize=8,
                    textcoords="offset points",
                )  # fmt: skip
        network, _, method = name.partition("-")
        title = f"ResNet-{network.removeprefix('resnet')}, {type(METHODS[method]).__name__}"
        column[0].set_title(title)
    figure.savefig(file, dpi=110)


def labels_apart(ax: Any, figure: Any, places: dict[str, Any]) -> dict[str, Any]:
    """Where each point's label stands beside it, in points, so that none covers another."""
    figure.canvas.draw()  # which lays everything out
    found = {}
    last = -math.inf
    for part, (x, y) in sorted(places.items(), key=lambda item: item[1][1]):
        height = 72 / figure.dpi * ax.transData.transform((x, y))[1]
        # The cheapest stand close together, so that theirs go above; the dearest have room left.
        across, up, side = (-4, 6, "left") if x < 1.1 else (5, -3, "left")
        if x > 4:
            across, side = -5, "right"
        last = max(height + up, last + 9)
        found[part] = (across, last - height), side
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--fit", type=int, default=0, metavar="IMAGES")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--costs", action="store_true", help="time predictions, on a quiet machine")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(Path(__file__).parent.parent / "docs/images/partial.png")
        return
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
            if arguments.costs and name in results["rows"]:
                spent = cost(made(name, where, method, network), network)
                results["rows"][name]["cost"] = round(spent, 2)
            elif not arguments.costs and name not in results["rows"]:
                results["rows"][name] = measure(name, where, method, network, arguments.fit)
            file.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results["rows"]))


if __name__ == "__main__":
    main()
