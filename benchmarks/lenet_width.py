"""LeNet on Fashion-MNIST, from scratch, at 1, 4, 16 and 64 times the parameters: iBNN against VI.

The second study of the iBNN paper (https://arxiv.org/abs/2010.13498, section 3.2, figures 2 and 4).

    BAYESIFY_DATA=../shared/data python benchmarks/lenet_width.py

Fits the runs (method, width, seed) that are missing in benchmarks/results/lenet_width.json and
writes each when it is done, then K = 8 components around U at 1 x, and draws
docs/images/lenet_width.png and docs/images/ibnn_components.png from that file. All of it takes
45 minutes on one busy thread, so it trains for little: 12,800 images, 4 epochs, alike for all.
--tune compares settings at 1 x and 4 x instead, on training images alone: METHODS has the iBNN with
the lowest NLL of 2,000 training images that are not fitted, and the VI with the lowest objective.
Delete the results if they change.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IBNN, BayesianModel, MeanFieldVI, Method
from bayesify.data import load_data
from bayesify.training import FitResult

HOME = Path(__file__).parent.parent
FILE = Path(__file__).parent / "results" / "lenet_width.json"
TRAIN, HELD, BATCH, EPOCHS = 12_800, 2_000, 64, 4
WIDTHS, SEEDS = (1, 2, 4, 8), (0, 1)  # hidden sizes times w: about w^2 times the parameters
NORMALISATION = ((0.2860,), (0.3530,))

METHODS: dict[str, Method] = {
    "iBNN": IBNN(
        mean_std=0.5, prior_std=0.1, lr=3e-2, latent_lr=1.0, samples=2, scratch=True, draws=8
    ),
    "VI": MeanFieldVI(prior_std=0.1, log_std=(-3.0, -3.0), lr=1e-2, draws=8),
    "VI, not converged": MeanFieldVI(draws=8),
}
CANDIDATES: list[Method] = [
    *(
        IBNN(
            prior_std=s, lr=lr, latent_lr=latent_lr, mean_std=0.5, samples=2, scratch=True, draws=8
        )
        for s, lr, latent_lr in (
            (0.1, 1e-2, 0.2),
            (0.1, 1e-2, 1.0),
            (0.1, 3e-2, 0.2),
            (0.1, 3e-2, 1.0),
            (0.3, 3e-2, 0.2),
        )
    ),
    *(
        MeanFieldVI(prior_std=s, lr=lr, log_std=(log_std, log_std), draws=8)
        for s, lr, log_std in (
            (1.0, 1e-3, -5.0),
            (1.0, 1e-2, -3.0),
            (0.3, 1e-2, -3.0),
            (0.1, 1e-2, -3.0),
            (0.1, 3e-3, -3.0),
        )
    ),
]


def build(width: int, seed: int) -> nn.Sequential:
    """LeNet-5 for images of 28 x 28, untrained; 44,426 parameters at width 1."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 6 * width, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6 * width, 16 * width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256 * width, 120 * width), nn.ReLU()),
        *(nn.Linear(120 * width, 84 * width), nn.ReLU()),
        nn.Linear(84 * width, 10),
    )


def data(part: str) -> TensorDataset:
    images = load_data(f"fashion-mnist:{part}", normalise=NORMALISATION)
    x, y = zip(*DataLoader(images, batch_size=1000), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(y))


def fit(
    method: Method, width: int, seed: int, validations: int = 1
) -> tuple[BayesianModel, FitResult]:
    """Where the method ends: nothing is chosen by the images held out."""
    bnn = bayesify.convert(build(width, seed), method)
    fitted = bnn.fit(
        DataLoader(data(f"train[:{TRAIN}]"), batch_size=BATCH, shuffle=True),
        epochs=EPOCHS,
        validation=DataLoader(data(f"train[-{HELD}:]"), batch_size=500),
        validations=validations,
        keep="last",
        temper=False,
        seed=seed,
        progress=False,
    )
    return bnn, fitted


def run(method: Method, width: int, seed: int) -> dict[str, float]:
    bnn, fitted = fit(method, width, seed)
    report = bnn.evaluate(DataLoader(data("test"), batch_size=500), seed=seed)
    return {
        "parameters": sum(p.numel() for p in bnn.network.parameters()),
        "error": 1 - report.accuracy,
        "nll": report.nll,
        "ece": report.ece,
        "final_loss": fitted.history[-1][1],
        "fit_seconds": round(fitted.seconds, 1),
    }


def tune(method: Method) -> dict[str, Any]:
    """At 1 x and 4 x: NLL of images held out, and the objective over the last tenth of steps."""
    fits = [fit(method, width, 0, validations=40)[1] for width in (1, 2)]
    objectives = [mean(loss for _, loss, _ in fitted.history[-4:]) for fitted in fits]
    return {
        "method": repr(method),
        "held_out_nll": [round(fitted.nll, 4) for fitted in fits],
        "objective": [round(objective, 4) for objective in objectives],
    }


def components(method: IBNN) -> dict[str, Any]:
    """U and the weights W_k = U diag(mean of z_k) of each component, in two principal components.

    Coordinates are relative to U; errors are of the plain networks with these weights. The plane's
    errors are of the networks in the plane through U, on the first 1,000 test images.
    """
    bnn, _ = fit(method, width=1, seed=0)
    stored = bnn.posterior.tensors()
    network = build(1, 0)
    shapes = {name: p.shape for name, p in network.named_parameters()}

    def flat(component: int | None) -> Tensor:
        state = {name: stored[f"weights:{name}"] for name in shapes}
        for name in [name for name in shapes if name.endswith("weight") and component is not None]:
            scale = stored[f"mean:{name.replace('weight', 'input_scale')}"][component]
            state[name] = state[name] * scale.reshape(1, -1, *[1] * (state[name].ndim - 2))
        return torch.cat([state[name].flatten() for name in shapes])

    @torch.no_grad()
    def error(weights: Tensor, test: TensorDataset) -> float:
        sizes = [shape.numel() for shape in shapes.values()]
        parts = weights.split(sizes)
        state = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        network.load_state_dict(state)
        x, y = test.tensors
        return (network(x).argmax(1) != y).float().mean().item()

    centre = flat(None)
    offsets = torch.stack([flat(k) for k in range(method.components)]) - centre
    cloud = torch.cat([offsets, torch.zeros_like(offsets[:1])])
    _, values, axes = torch.linalg.svd(cloud - cloud.mean(0), full_matrices=False)
    explained = (values**2 / (values**2).sum())[:2]
    places = offsets @ axes[:2].T
    test, few = data("test"), data("test[:1000]")
    reach = 1.3 * places.abs().max().item()
    ticks = torch.linspace(-reach, reach, 21)
    plane = [[error(centre + a * axes[0] + b * axes[1], few) for a in ticks] for b in ticks]
    return {
        "method": repr(method),
        "explained": explained.tolist(),
        "u_error": error(centre, test),
        "component_errors": [error(centre + offset, test) for offset in offsets],
        "mixture_error": 1 - (bnn.evaluate(DataLoader(test, batch_size=500)).accuracy or 0.0),
        "places": places.tolist(),
        "ticks": [round(tick, 4) for tick in ticks.tolist()],
        "plane": [[round(value, 3) for value in row] for row in plane],
    }


def draw_widths(runs: list[dict[str, Any]], file: Path) -> None:
    """Error, NLL and ECE by size: a line through the seeds' means, a dot for each seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    labels = {"error": "test error", "nll": "test NLL (nats)", "ece": "test ECE"}
    styles = zip(METHODS, ("#0072B2", "#D55E00", "#E69F00"), ("o-", "s-", "^--"), strict=True)
    for name, colour, style in styles:
        own = [row for row in runs if row["method"] == name]
        sizes = sorted({row["parameters"] for row in own})
        for ax, key in zip(axes, labels, strict=True):
            means = [mean(row[key] for row in own if row["parameters"] == n) for n in sizes]
            ax.plot(sizes, means, style, color=colour, label=name)
            ax.scatter(
                [row["parameters"] for row in own], [row[key] for row in own], s=12, color=colour
            )
    for ax, label in zip(axes, labels.values(), strict=True):
        ax.set(xscale="log", xlabel="parameters of the network", ylabel=label)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    axes[0].yaxis.set_major_formatter("{x:.0%}")
    axes[0].legend()
    figure.suptitle(TITLE)
    figure.savefig(file, dpi=130)
    plt.close(figure)


TITLE = (
    "LeNet on Fashion-MNIST, 1 to 64 times the parameters: iBNN gains by size. Mean-field VI\n"
    "ignores the data at last, where its objective is brought down; it learns while that is high."
)


def draw_components(found: Mapping[str, Any], file: Path) -> None:
    """U, the components' weights around it, and the error of the plane they are shown in."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 5.4), layout="constrained")
    ticks, plane = found["ticks"], torch.tensor(found["plane"])
    shades = ax.contourf(ticks, ticks, plane, 12, cmap="cividis_r", alpha=0.8)
    bar = figure.colorbar(shades, label="error of the network at each place (1,000 test images)")
    bar.ax.yaxis.set_major_formatter("{x:.0%}")
    places = torch.tensor(found["places"])
    ax.scatter(*places.T, s=60, color="#E69F00", edgecolor="black", label="components $W_k$")
    ax.scatter(0, 0, s=240, marker="*", color="#D55E00", edgecolor="black", label="$U$")
    named = zip(
        [*found["places"], (0, 0)], [*found["component_errors"], found["u_error"]], strict=True
    )
    for place, error in named:
        side = 1 if place[0] >= 0 else -1  # away from the middle
        ax.annotate(
            f"{error:.1%}",
            place,
            (7 * side, 7),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
        )
    first, second = (f"{share:.0%} of the variance" for share in found["explained"])
    ax.set(xlabel=f"first principal component ({first})", ylabel=f"second ({second})")
    ax.legend(loc="lower right")
    ax.set_title(
        f"{len(places)} components of an iBNN around $U$, with each one's own test error;\n"
        f"the mixture's is {found['mixture_error']:.1%} (LeNet, Fashion-MNIST)"
    )
    figure.savefig(file, dpi=130)
    plt.close(figure)


def write(results: Mapping[str, Any]) -> None:
    """JSON with a line for each run."""
    parts = []
    for name, value in results.items():
        rows = [f"  {json.dumps(row)}" for row in value] if isinstance(value, list) else []
        text = "[\n" + ",\n".join(rows) + "\n ]" if rows else json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="compare settings at 1 x and 4 x")
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    results["command"] = "BAYESIFY_DATA=../shared/data python benchmarks/lenet_width.py"
    results["settings"] = {
        "train_images": TRAIN,
        "epochs": EPOCHS,
        "batch": BATCH,
        "methods": {name: repr(method) for name, method in METHODS.items()},
        "torch": torch.__version__,
    }
    tuning, runs = (results.setdefault(name, []) for name in ("tuning", "runs"))
    if asked.tune:
        done = {row["method"] for row in tuning}
        for method in CANDIDATES:
            if repr(method) not in done:
                tuning.append(tune(method))
                print(json.dumps(tuning[-1]), flush=True)
                write(results)
        return
    done = {(row["method"], row["width"], row["seed"]) for row in runs}
    for seed, width, name in product(SEEDS, WIDTHS, METHODS):
        if (name, width, seed) not in done:
            found = run(METHODS[name], width, seed)
            runs.append({"method": name, "width": width, "seed": seed, **found})
            print(json.dumps(runs[-1]), flush=True)
            write(results)
    if "components" not in results:
        method = METHODS["iBNN"]
        assert isinstance(method, IBNN)  # noqa: S101  (above)
        results["components"] = components(replace(method, components=8, draws=16))
        write(results)
    draw_widths(runs, HOME / "docs/images/lenet_width.png")
    draw_components(results["components"], HOME / "docs/images/ibnn_components.png")


if __name__ == "__main__":
    main()
