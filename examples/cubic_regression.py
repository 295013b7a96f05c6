"""y = x^3 from 30 noisy points: iBNN and mean-field VI as networks get deeper.

The first study of the iBNN paper (https://arxiv.org/abs/2010.13498, section 3.1): ReLU networks of
1 to 5 hidden layers of 256, trained from scratch on x uniform in [-4, 4] and y = x^3 + N(0, 3^2).

    python examples/cubic_regression.py     # 3 seeds, about 20 minutes on one thread
    python examples/cubic_regression.py --layers 1 3 --seeds 0 --steps 500 --folder quick

Writes benchmarks/results/cubic_regression.json and draws docs/images/cubic_regression.png from it.
Every run is written when it is done, and is not repeated.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IBNN, MeanFieldVI, Method

HOME = Path(__file__).parent.parent
POINTS, NOISE, EDGE = 30, 3.0, 4.0
GRID = torch.linspace(-6, 6, 97).unsqueeze(1)
TITLE = (
    "y = x³ from 30 points: iBNN fits at every depth. Mean-field VI ignores the data at every\n"
    "depth once its objective has converged; it fits while it is far from that."
)

# The first two were chosen on training points alone by benchmarks/cubic_tuning.py: iBNN by points
# held out, VI by its own objective, which ends at 1.5. MeanFieldVI's default settings start it
# nearly certain and slow: after as many steps its objective is still 90 (1 layer) to 31,000 (5).
METHODS: dict[str, Method] = {
    "iBNN": IBNN(
        mean_std=0.5, prior_std=0.3, lr=3e-3, latent_lr=0.05, samples=2, scratch=True, draws=100
    ),
    "VI": MeanFieldVI(prior_std=0.1, log_std=(-3.0, -3.0), lr=3e-3, draws=100),
    "VI, not converged": MeanFieldVI(draws=100),
}


def draw_points(seed: int) -> tuple[Tensor, Tensor]:
    """30 points of the cubic, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = EDGE * (2 * torch.rand(POINTS, 1, generator=generator) - 1)
    return x, x**3 + NOISE * torch.randn(POINTS, 1, generator=generator)


def build(layers: int, width: int, seed: int) -> nn.Sequential:
    """An untrained ReLU network."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(1, width), nn.ReLU())
    for _ in range(layers - 1):
        network.extend([nn.Linear(width, width), nn.ReLU()])
    return network.append(nn.Linear(width, 1))


def run(method: Method, layers: int, width: int, steps: int, seed: int) -> dict[str, Any]:
    """Fits one network: how far it is from the true function, and how sure it is."""
    x, y = draw_points(seed)
    data = TensorDataset((x - x.mean()) / x.std(), (y - y.mean()) / y.std())
    bnn = bayesify.convert(build(layers, width, seed), method, likelihood="regression")
    fitted = bnn.fit(
        DataLoader(data, batch_size=POINTS, shuffle=True),
        epochs=steps,  # one step each
        validation=DataLoader(data, batch_size=POINTS),
        validations=1,
        keep="last",  # where the method ends, not where it fitted best on the way
        temper=False,
        seed=seed,
        progress=False,
    )
    p = bnn.predict((GRID - x.mean()) / x.std())
    middle, spread = p.mean * y.std() + y.mean(), p.epistemic.sqrt() * y.std()
    inside = GRID.abs() <= EDGE
    return {
        "rmse": (middle - GRID**3)[inside].square().mean().sqrt().item(),
        "epistemic_std": spread[inside].mean().item(),
        "epistemic_std_outside": spread[~inside].mean().item(),
        "noise_std": (p.aleatoric.sqrt().mean() * y.std()).item(),
        "final_loss": fitted.history[-1][1],
        "seconds": round(fitted.seconds, 1),
        "mean": [round(value, 2) for value in middle.flatten().tolist()],
        "std": [round(value, 2) for value in spread.flatten().tolist()],
    }


def draw_figure(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """A row for each method, a column for each depth: the first seed's data and predictions."""
    runs = [row for row in runs if row["seed"] == runs[0]["seed"]]
    names, depths = (list(dict.fromkeys(row[key] for row in runs)) for key in ("method", "layers"))
    figure, axes = plt.subplots(
        len(names),
        len(depths),
        figsize=(2.4 * len(depths) + 1.2, 2.2 * len(names) + 1.2),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    x = GRID.flatten()
    for row in runs:
        ax = axes[names.index(row["method"]), depths.index(row["layers"])]
        middle, spread = torch.tensor(row["mean"]), torch.tensor(row["std"])
        for k in (3, 2, 1):
            band = {"color": "#56B4E9", "alpha": 0.3, "linewidth": 0}
            if k == 1:
                band["label"] = "±1, 2, 3 epistemic std"
            ax.fill_between(x, middle - k * spread, middle + k * spread, **band)
        ax.plot(x, middle, color="#0072B2", linewidth=2, label="mean")
        ax.plot(x, x**3, "--", color="black", linewidth=1, label="true function")
        ax.scatter(*draw_points(row["seed"]), s=12, color="#D55E00", zorder=3, label="data")
        ax.set(xlim=(-6, 6), ylim=(-140, 140), xticks=(-4, 0, 4))
        ax.text(0.05, 0.93, f"RMSE {row['rmse']:.1f}", transform=ax.transAxes, va="top")
    for ax, layers in zip(axes[0], depths, strict=True):
        ax.set_title(f"{layers} hidden layer{'s' * (layers > 1)}")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    for ax, name in zip(axes[:, 0], names, strict=True):
        ax.set_ylabel(name + "\ny", fontsize="large")
    figure.suptitle(TITLE, fontsize="x-large")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, in Markdown."""
    lines = [
        "| method | hidden layers | RMSE | epistemic std | noise std |",
        "|---|---|---|---|---|",
    ]
    for name, layers in dict.fromkeys((row["method"], row["layers"]) for row in runs):
        rows = [row for row in runs if (row["method"], row["layers"]) == (name, layers)]
        cells = [f"| {name} | {layers} |"]
        for key in ("rmse", "epistemic_std", "noise_std"):
            values = [row[key] for row in rows]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.1f}{spread} |")
        lines.append(" ".join(cells))
    return "\n".join(lines)


def read(file: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that are done, if they are of these settings."""
    if not file.exists():
        return []
    stored = json.loads(file.read_text())
    if stored["settings"] != settings:
        raise SystemExit(f"{file} is of other settings: name another --folder, or delete it.")
    done: list[dict[str, Any]] = stored["runs"]
    return done


def write(file: Path, settings: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    """JSON with a line for each run."""
    head = json.dumps(
        {"command": "python examples/cubic_regression.py", "settings": settings}, indent=2
    )
    rows = ",\n".join(f"    {json.dumps(row)}" for row in runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{head[:-2]},\n  "runs": [\n{rows}\n  ]\n}}\n')


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, prints the table and draws the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=HOME, help="where results and figure go")
    asked = parser.parse_args(arguments)
    settings = {"steps": asked.steps, "width": asked.width, "points": POINTS, "noise": NOISE}
    settings["methods"] = {name: repr(method) for name, method in METHODS.items()}
    settings["torch"] = torch.__version__
    file = asked.folder / "benchmarks/results/cubic_regression.json"
    runs = read(file, settings)
    done = {(row["method"], row["layers"], row["seed"]) for row in runs}
    for seed in asked.seeds:
        for name, method in METHODS.items():
            for layers in asked.layers:
                if (name, layers, seed) in done:
                    continue
                found = run(method, layers, asked.width, asked.steps, seed)
                runs.append({"method": name, "layers": layers, "seed": seed, **found})
                print(name, layers, seed, f"RMSE {found['rmse']:.2f}", flush=True)
                write(file, settings, runs)
    print(table(runs))
    draw_figure(runs, asked.folder / "docs/images/cubic_regression.png")


if __name__ == "__main__":
    main()
