"""Noise and temperature can stand in for each other: which of the two should explain a network's
overconfidence? By training images alone: no test set is read.

    BAYESIFY_DATA=../shared/data python benchmarks/noise_first.py NETWORK

NETWORK is resnet20 or resnet56, for ABNN as it is untrained. Two ways to calibrate are compared:
the noise and temperature that are likeliest together, and the noise that is likeliest without a
temperature, which is then chosen for it. Three times, 1,000 training images under strong
augmentation calibrate, and 1,000 others judge: by NLL and ECE, and by how well predictive entropy
tells them from 1,000 training images that were made strange (AUROC; see abnn_share.py). `calibrate`
takes the second where calibration data cannot tell it from the first by more than a standard error;
"chosen" is what it does. Writes benchmarks/results/noise_first-NETWORK.json time by time; takes 20
minutes on one thread for resnet20, three times that for resnet56.
"""

import argparse
import json
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from abnn_share import images, made_strange

import bayesify
from bayesify import ABNN
from bayesify.batches import labelled
from bayesify.calibration import Search, Trial, as_likely
from bayesify.evaluation.detection import auroc
from bayesify.validation import HeldOut
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"
WAYS = {"likeliest together": "nll", "noise first": "untempered"}  # what each goes by


def compare(model: torch.nn.Module, time: int) -> dict[str, Any]:
    calibrating, judging = HeldOut(list(labelled(images(time)))).halves()
    data = [(inputs.args[0], target) for inputs, target in judging]
    strange = made_strange(time)
    bnn = bayesify.convert(model, ABNN(), where=0.5)  # the default when this was decided
    search = Search(bnn, calibrating, bnn.method.draws, time)
    search._quiet()
    walked: dict[float, Trial] = {}
    trials = {way: search._walk(0.1, walked, attrgetter(measure)) for way, measure in WAYS.items()}
    found = {}
    for way, trial in trials.items():
        bnn.noise, bnn.temperature = trial.noise, trial.temperature
        report = bnn.evaluate(data, seed=time)
        usual = torch.cat([bnn.predict(x, seed=time).uncertainty for x, _ in data])
        found[way] = {
            "noise": trial.noise,
            "temperature": bnn.temperature,
            "nll": report.nll,
            "ece": report.ece,
            "auroc": {
                kind: auroc(usual, bnn.predict(x, seed=time, batch_size=250).uncertainty)
                for kind, x in strange.items()
            },
        }
    together, first = trials.values()
    return {"ways": found, "chosen": list(WAYS)[as_likely(first.losses, together.losses)]}


def table(results: dict[str, Any]) -> str:
    lines = ["| | noise | temperature | NLL ↓ | ECE ↓ | AUROC, made strange ↑ | chosen |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|")
    for time in results["times"]:
        for way, row in time["ways"].items():
            lines.append(
                f"| {way} | {row['noise']:.3f} | {row['temperature']:.2f} | {row['nll']:.4f} | "
                f"{row['ece']:.4f} | {mean(row['auroc'].values()):.4f} | "
                f"{'yes' if time['chosen'] == way else ''} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    name = parser.parse_args().network
    results: dict[str, Any] = {
        "command": f"python benchmarks/noise_first.py {name}",
        "times": [],
    }
    model = load_model(f"cifar10-{name}")
    for time in range(3):
        results["times"].append(compare(model, time))
        file = RESULTS / f"noise_first-{name}.json"
        file.write_text(json.dumps(results, indent=2) + "\n")
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
