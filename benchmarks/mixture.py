"""What to mix, and how much noise ABNN gets there? By training images: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.mixture NETWORK [--seed 0]

NETWORK is resnet20 or resnet56. The mixture as `make bench-quality` fits it (a fit that is in its
cache is taken from there), its parts, and all that can be mixed of them, with eight draws of each
part and no temperature: NLL and accuracy on the 2,000 training images that `fit` held out, strongly
augmented. Then all parts with no draw mirrored, and with other factors on the noise that ABNN was
fitted with. Adds to benchmarks/results/mixture.json.
"""

import argparse
import json
from itertools import combinations
from typing import cast

import torch
from torch import Tensor

from bayesify import BayesianModel
from bayesify.methods.mixture import Parts
from bayesify.posterior import key
from bayesify.validation import HeldOut, hold_out
from benchmarks.quality.headline import fitted
from benchmarks.quality.labels import training_batches
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import FULL
from benchmarks.quality.units import Unit

PARTS = ("ABNN", "BayesAdapter", "iBNN")
FACTORS = (0.0, 0.5, 2.0)
DRAWS = 24
FILE = RESULTS / "mixture.json"


def probabilities(bnn: BayesianModel, held: HeldOut) -> list[Tensor]:
    """Each part's mean probabilities."""
    seed = key("judge", 0)
    outputs = [
        torch.cat(list(bnn.outputs(x, draws=DRAWS, seed=seed))).softmax(2) for x, _ in held.batches
    ]
    drawn = torch.cat(outputs, dim=1)
    return [drawn[part :: len(PARTS)].mean(0) for part in range(len(PARTS))]


def judged(mixed: list[Tensor], target: Tensor) -> dict[str, float]:
    probs = torch.stack(mixed).mean(0)
    losses = -probs[torch.arange(len(target)), target].log()
    return {
        "nll": losses.mean().item(),
        "error": losses.std().item() / len(losses) ** 0.5,
        "accuracy": (probs.argmax(1) == target).float().mean().item(),
    }


def mixture_asked_for(description: str | None) -> tuple[str, BayesianModel, HeldOut, Tensor]:
    """By the command line: its words, the fitted mixture, what was held out, and its labels."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    _, held = hold_out(training_batches(f"cifar10:train[:{FULL.train}]"), asked.seed)
    target = torch.cat([torch.as_tensor(y) for _, y in held.batches])
    bnn, _ = fitted(Unit(f"cifar10-{asked.network}", "Mixture", asked.seed, "fit"), FULL)
    return f"{asked.network} --seed {asked.seed}", bnn, held, target


@torch.no_grad()
def main() -> None:
    words, bnn, held, target = mixture_asked_for(__doc__)
    each = probabilities(bnn, held)
    found = {
        " + ".join(PARTS[part] for part in parts): judged([each[part] for part in parts], target)
        for count in range(1, len(PARTS) + 1)
        for parts in combinations(range(len(PARTS)), count)
    }
    mirrored = bnn.mirrored
    bnn.mirrored = False
    found["all, none mirrored"] = judged(probabilities(bnn, held), target)
    bnn.mirrored = mirrored
    abnn = cast("Parts", bnn.posterior).members()[0]
    own = abnn.noise
    for factor in FACTORS:
        abnn.noise = factor * own
        other, *_ = probabilities(bnn, held)
        found[f"all, ABNN's noise times {factor:g}"] = judged([other, *each[1:]], target)
    for name, figures in found.items():
        print(name, figures, flush=True)
    content = json.loads(FILE.read_text()) if FILE.exists() else {}
    content[words] = {"method": repr(bnn.method), **found}
    FILE.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
