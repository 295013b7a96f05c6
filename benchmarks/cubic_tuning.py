"""How the settings of examples/cubic_regression.py were chosen, on training points alone.

    python benchmarks/cubic_tuning.py

Fits the 30 points of seed 0 but six, with 1, 3 and 5 hidden layers, and writes the NLL of the six
and the method's own objective at the end (mean of 5 of the last tenth of steps) into
benchmarks/results/cubic_tuning.json. iBNN's settings have the lowest mean NLL; mean-field VI's have
the lowest mean objective, which is the bound that VI is about.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IBNN, MeanFieldVI, Method

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from cubic_regression import build, draw_points

FILE = Path(__file__).parent / "results" / "cubic_tuning.json"
LAYERS, WIDTH, STEPS, HELD = (1, 3, 5), 256, 2000, 6
CANDIDATES: list[Method] = [
    *(
        IBNN(mean_std=0.5, prior_std=prior_std, lr=lr, latent_lr=latent_lr, samples=2, scratch=True)
        for prior_std, lr, latent_lr in (
            (0.1, 1e-3, 0.05),
            (0.1, 3e-3, 0.02),
            (0.1, 3e-3, 0.05),
            (0.1, 3e-3, 0.2),
            (0.1, 1e-2, 0.05),
            (0.3, 3e-3, 0.05),
        )
    ),
    *(
        MeanFieldVI(prior_std=prior_std, log_std=(log_std, log_std), lr=lr)
        for prior_std, log_std, lr in (
            (1.0, -5.0, 1e-3),
            (1.0, -3.0, 1e-2),
            (0.3, -3.0, 1e-2),
            (0.1, -5.0, 1e-3),
            (0.1, -3.0, 1e-2),
            (0.1, -3.0, 3e-3),
        )
    ),
]


def judge(method: Method, layers: int) -> tuple[float, float]:
    """Held-out NLL and objective, both where training ends."""
    x, y = draw_points(0)
    data = TensorDataset((x - x.mean()) / x.std(), (y - y.mean()) / y.std())
    held, rest = (TensorDataset(*data[rows]) for rows in (slice(HELD), slice(HELD, None)))
    bnn = bayesify.convert(build(layers, WIDTH, 0), method, likelihood="regression")
    fitted = bnn.fit(
        DataLoader(rest, batch_size=len(rest), shuffle=True),
        epochs=STEPS,
        validation=DataLoader(held, batch_size=HELD),
        validations=50,
        keep="last",
        temper=False,
        progress=False,
    )
    return fitted.nll, mean(loss for _, loss, _ in fitted.history[-5:])


def main() -> None:
    rows: list[dict[str, Any]] = []
    for method in CANDIDATES:
        judged = [judge(method, layers) for layers in LAYERS]
        nlls, objectives = zip(*judged, strict=True)
        rows.append(
            {
                "method": repr(method),
                "held_out_nll": round(mean(nlls), 3),
                "objective": round(mean(objectives), 3),
                "held_out_nll_by_layers": [round(value, 3) for value in nlls],
                "objective_by_layers": [round(value, 3) for value in objectives],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        results = {
            "command": "python benchmarks/cubic_tuning.py",
            "torch": torch.__version__,
            "settings": {"layers": LAYERS, "width": WIDTH, "steps": STEPS, "held_out": HELD},
            "candidates": rows,
        }
        FILE.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
