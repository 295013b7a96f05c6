"""Gradient variance of a draw for each example against a shared draw, one Bayesian layer.

    BAYESIFY_DATA=../shared/data python benchmarks/gradient_variance.py [--runs 500]

The experiment of the BayesAdapter paper: a toy model that is one Bayesian convolution, fixed inputs
and target outputs, and the variance of the stochastic gradients of mu and psi over many runs,
averaged over all coordinates (batch 256). Then the same for single convolutions of the public
ResNet-20 (64 training images, cross-entropy). In between: groups of a batch that share a draw.
Writes benchmarks/results/gradient_variance.json.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import BayesAdapter
from bayesify.batches import as_inputs
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.posterior import MeanField, fresh_normals, key
from bayesify.zoo import load_model

FILE = Path(__file__).parent / "results" / "gradient_variance.json"
LAYERS = ("conv1.weight", "layer1.0.conv1.weight", "layer2.1.conv2.weight", "layer3.2.conv2.weight")
TOY = "a convolution alone"


def toy() -> tuple[bayesify.BayesianModel, Tensor, Tensor]:
    """One convolution of 3 x 3, 16 to 16 channels, 8 x 8 pixels, and a random regression target."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    bnn = bayesify.convert(convolution, BayesAdapter(), likelihood="regression")
    return bnn, torch.randn(256, 16, 8, 8), torch.randn(256, 16, 8, 8)


def resnet20(layer: str) -> tuple[bayesify.BayesianModel, Tensor, Tensor]:
    """One convolution of the trained network, on training images."""
    bnn = bayesify.convert(load_model("cifar10-resnet20"), BayesAdapter(), where=layer)
    data = load_data("cifar10:train[:64]", normalise=CIFAR10_NORMALISATION)
    x, y = next(iter(DataLoader(data, batch_size=64)))
    return bnn, x, y


def variance(
    bnn: bayesify.BayesianModel, x: Tensor, y: Tensor, groups: int, runs: int
) -> dict[str, float]:
    """Mean over coordinates of the gradients' variance, for means and log standard deviations."""
    posterior = bnn.posterior
    assert isinstance(posterior, MeanField)  # noqa: S101
    parameters = [*posterior.mean.parameters(), *posterior.log_std.parameters()]
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    squares = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    parts = as_inputs(x).map(lambda t: t.unflatten(0, (groups, -1)))
    for run in range(runs):
        noise = fresh_normals(posterior.shapes(), seed=key("run", run), count=groups)
        draws = posterior(torch.zeros(groups, dtype=torch.long), noise)
        output = bnn.runner.paired(draws, parts).flatten(0, 1)
        loss = bnn.likelihood.loss(output, bnn.likelihood.target(y, output)).mean()
        gradients = torch.autograd.grad(loss, parameters)
        for total, square, gradient in zip(sums, squares, gradients, strict=True):
            total.add_(gradient)
            square.add_(gradient.double().square())
    values = [
        float((square / runs - (total / runs).square()).mean() * runs / (runs - 1))
        for square, total in zip(squares, sums, strict=True)
    ]
    return {"mu": values[0], "psi": values[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500, help="of the convolution alone")
    parser.add_argument("--layer-runs", type=int, default=50, help="of each layer of ResNet-20")
    arguments = parser.parse_args()
    command = (
        f"python benchmarks/gradient_variance.py --runs {arguments.runs} "
        f"--layer-runs {arguments.layer_runs}"
    )
    results: dict[str, dict[str, dict[str, float]]] = {}
    for layer in (TOY, *LAYERS):
        bnn, x, y = toy() if layer == TOY else resnet20(layer)
        runs = arguments.runs if layer == TOY else arguments.layer_runs
        batch = len(x)
        rows = {str(groups): variance(bnn, x, y, groups, runs) for groups in (1, 2, 4, 8, batch)}
        own = rows[str(batch)]
        print(layer)
        for groups, row in rows.items():
            row |= {f"{name}_ratio": row[name] / own[name] for name in ("mu", "psi")}
            print(
                f"  {groups:>3} draws a batch of {batch}: variance of the gradient of mu "
                f"{row['mu']:.2e}, {row['mu_ratio']:.1f} x that of a draw for each example; "
                f"psi {row['psi']:.2e}, {row['psi_ratio']:.1f} x",
                flush=True,
            )
        results[layer] = rows
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps({"command": command, "layers": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
