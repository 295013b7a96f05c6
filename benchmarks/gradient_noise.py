"""Gradient variance of the network itself, ABNN and a mean-field BNN, on the public ResNet-20.

    BAYESIFY_DATA=../shared/data python benchmarks/gradient_noise.py [--runs 24]

The question of the ABNN paper's table 4: how much noisier does training become when weights are
random? Each run takes 64 of 1,024 training images and the gradient that `fit` would take of them,
from the checkpoint on; the variance is over runs, averaged over all numbers that train. The network
itself varies too, by its mini-batches: it is measured over the same numbers, with the noise set to
0, once for the scales and shifts that ABNN trains and once for the means that a BNN trains over all
weights. A draw is shared by the batch, or every image has one of its own. The answer depends on how
wide the posterior is, so that several widths are measured, each with the loss that a single draw
has: methods should be compared where that is alike.
Writes benchmarks/results/gradient_noise.json.
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, MeanFieldVI
from bayesify.batches import labelled
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.evaluation.landscape import GradientNoise, gradient_noise
from bayesify.methods import Method
from bayesify.zoo import load_model

FILE = Path(__file__).parent / "results" / "gradient_noise.json"
EXAMPLES, BATCH = 1024, 64
METHODS: dict[str, dict[float, Method]] = {
    "ABNN": {
        noise: ABNN(members=1, draws=1, favoured_weight=1.0, noise=noise)
        for noise in (0.01, 0.03, 0.1)
    },
    "BNN": {
        log_std: MeanFieldVI(draws=1, log_std=(log_std, log_std)) for log_std in (-7.0, -6.0, -5.0)
    },
}
WIDTH = {"ABNN": "noise", "BNN": "log_std"}
GROUPS = {"a draw a batch": 1, "a draw an image": BATCH}
DRAWS = 8  # of which the loss is averaged


def loss_of_draws(bnn: bayesify.BayesianModel, batch: Any) -> float:
    """Mean loss of single draws on the images."""
    batches = list(labelled([batch]))
    return statistics.fmean(bnn.judge(batches, draws=1, seed=seed)[0] for seed in range(DRAWS))


def measure(
    network: nn.Module, method: Method, batch: Any, groups: int, runs: int
) -> GradientNoise:
    """The gradient's variance over mini-batches and draws."""
    bnn = bayesify.convert(network, method)
    return gradient_noise(bnn, batch, runs=runs, subset=BATCH, groups=groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=24, help="of each method")
    runs = parser.parse_args().runs
    network = load_model("cifar10-resnet20")
    data = load_data(f"cifar10:train[:{EXAMPLES}]", normalise=CIFAR10_NORMALISATION)
    batch = next(iter(DataLoader(data, batch_size=EXAMPLES)))
    results: dict[str, Any] = {
        "command": f"python benchmarks/gradient_noise.py --runs {runs}",
        "examples": EXAMPLES,
        "batch": BATCH,
        "methods": {},
    }
    for name, methods in METHODS.items():
        plain = replace(next(iter(methods.values())), noise=0.0)
        own = measure(network, plain, batch, 1, runs)
        loss = loss_of_draws(bayesify.convert(network, plain), batch)
        print(f"the network itself, over {own.parameters:,} numbers of {name}: loss {loss:.3f}")
        rows = []
        for width, method in methods.items():
            row = {
                WIDTH[name]: width,
                "loss": loss_of_draws(bayesify.convert(network, method), batch),
            }
            for kind, groups in GROUPS.items():
                found = measure(network, method, batch, groups, runs)
                ratio = found.variance / own.variance
                row[kind] = asdict(found) | {"ratio": ratio}
                print(
                    f"{name}, {WIDTH[name]} {width:g} (loss of a draw {row['loss']:.3f}), {kind}: "
                    f"variance {found.variance:.2e}, {ratio:.1f} x the network's own",
                    flush=True,
                )
            rows.append(row)
        results["methods"][name] = {"the network itself": {"loss": loss} | asdict(own), name: rows}
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
