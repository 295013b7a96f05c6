"""ABNN on the public ResNet-20 checkpoint: untrained and fitted, beside temperature scaling.

    BAYESIFY_DATA=../shared/data python benchmarks/resnet20.py [--seed 0] [--train 20000]

Calibrates on the first 2,000 CIFAR-10 test images and measures on the other 8,000, with 5,000 SVHN
crops as what is not CIFAR-10. This checks the machinery on a public test set: no default is chosen
by it. Writes benchmarks/results/resnet20-seed<seed>.json; takes about half an hour on two cores.
With --last-half only the last half of the normalisation layers is random, which was the default for
a while, and the file is resnet20-last-half-seed<seed>.json. With --table it measures nothing and
prints the Markdown table of what is in that file.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN
from bayesify.batches import as_inputs
from bayesify.calibration import averaged, best_temperature
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"


def loader(spec: str, batch_size: int = 250, *, shuffle: bool = False) -> DataLoader[Any]:
    data = load_data(spec, normalise=CIFAR10_NORMALISATION)
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def same_bit_for_bit(model: torch.nn.Module) -> bool:
    """Whether a draw without noise equals the network on every test image."""
    network = bayesify.convert(model, ABNN(noise=0.0)).sample(0)
    with torch.no_grad():
        return all(torch.equal(network(x), model(x)) for x, _ in loader("cifar10:test"))


def table(results: dict[str, Any]) -> str:
    lines = [
        "| | accuracy ↑ | NLL ↓ | ECE ↓ | Brier ↓ | AUROC, SVHN ↑ |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in results["rows"].items():
        lines.append(
            f"| {name} | {row['accuracy']:.2%} | {row['nll']:.4f} | {row['ece']:.4f} | "
            f"{row['brier']:.4f} | {row['ood']['svhn']['auroc']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=20_000, help="images to fit on; 0: no fit")
    parser.add_argument("--last-half", action="store_true", help="of the normalisation layers")
    parser.add_argument("--table", action="store_true", help="print the table of an earlier run")
    arguments = parser.parse_args()
    seed = arguments.seed
    which, where = ("-last-half", 0.5) if arguments.last_half else ("", None)
    file = RESULTS / f"resnet20{which}-seed{seed}.json"
    if arguments.table:
        print(table(json.loads(file.read_text())))
        return

    command = f"python benchmarks/resnet20.py --seed {seed} --train {arguments.train}"
    command += " --last-half" if arguments.last_half else ""
    model = load_model("cifar10-resnet20")
    plain = ABNN(members=1, draws=1, noise=0.0)
    calibration, test = "cifar10:test[:2000]", "cifar10:test[2000:]"
    facts: dict[str, Any] = {}
    rows: dict[str, Any] = {}

    def measure(name: str, bnn: bayesify.BayesianModel, **more: Any) -> None:
        started = time.monotonic()
        report = bnn.evaluate(loader(test), ood={"svhn": loader("svhn")}, seed=seed)
        rows[name] = report.to_dict() | {
            "noise": bnn.noise,
            "temperature": bnn.temperature,
            "evaluate_seconds": time.monotonic() - started,
            **more,
        }
        print(name, json.dumps(rows[name]), flush=True)
        results = {"command": command, "method": repr(ABNN()), **facts, "rows": rows}
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(results, indent=2) + "\n")

    whole = bayesify.convert(model, plain).evaluate(loader("cifar10:test"))
    facts |= {"accuracy_without_noise": whole.accuracy, "bit_for_bit": same_bit_for_bit(model)}
    print(facts, flush=True)

    network = bayesify.convert(model, plain)
    measure("network", network)
    x, y = next(iter(loader(calibration, 2000)))
    with torch.no_grad():
        outputs = torch.cat(list(network.outputs(as_inputs(x))))
    averages = averaged(network.likelihood, outputs)
    network.temperature, _ = best_temperature(network.likelihood, averages, y)
    measure("temperature", network)

    bnn = bayesify.convert(model, ABNN(), where=where)
    started = time.monotonic()
    bnn.calibrate(loader(calibration), seed=seed)
    measure("abnn, calibrated", bnn, calibrate_seconds=time.monotonic() - started)

    if arguments.train:
        bnn = bayesify.convert(model, ABNN(), where=where)
        started = time.monotonic()
        fitted = bnn.fit(
            loader(f"cifar10:train[:{arguments.train}]", 128, shuffle=True),
            augment="crop-flip",
            seed=seed,
        )
        fit_seconds = time.monotonic() - started
        print(fitted, flush=True)
        bnn.calibrate(loader(calibration), seed=seed)
        measure("abnn, fitted and calibrated", bnn, fit_seconds=fit_seconds, fit=str(fitted))

    print(table({"rows": rows}))


if __name__ == "__main__":
    main()
