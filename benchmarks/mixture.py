"""Which methods to mix? By training images alone: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.mixture

ABNN, BayesAdapter and iBNN as `make bench-quality` fits them on ResNet-20 (seed 0; fits that are in
its cache are taken from there), and every mixture of them: NLL, with no temperature, of the 2,000
training images that `fit` held out, strongly augmented. 24 draws in all, equally many of each part.
Writes benchmarks/results/mixture.json.
"""

import json
from itertools import combinations

import torch
from torch import Tensor

from bayesify.posterior import key
from bayesify.validation import hold_out
from benchmarks.quality.headline import fitted
from benchmarks.quality.labels import training_batches
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import FULL
from benchmarks.quality.units import Unit

METHODS = ("ABNN", "BayesAdapter", "iBNN")
DRAWS = 24


@torch.no_grad()
def main() -> None:
    _, held = hold_out(training_batches(f"cifar10:train[:{FULL.train}]"), 0)
    target = torch.cat([torch.as_tensor(y) for _, y in held.batches])
    draws: dict[str, Tensor] = {}  # probability of the right class, by draw and image
    for name in METHODS:
        bnn, _ = fitted(Unit("cifar10-resnet20", name, 0, "fit"), FULL)
        outputs = [
            torch.cat(list(bnn.outputs(x, draws=DRAWS, seed=key("judge", 0))))
            for x, _ in held.batches
        ]
        probs = torch.cat(outputs, dim=1).softmax(2)
        draws[name] = probs[:, torch.arange(len(target)), target]
    found = {}
    for parts in range(1, 4):
        for names in combinations(METHODS, parts):
            each = [draws[name][: DRAWS // parts].mean(0) for name in names]
            losses = -torch.stack(each).mean(0).log()
            found[" + ".join(names)] = {
                "nll": losses.mean().item(),
                "error": losses.std().item() / len(losses) ** 0.5,
            }
            print(" + ".join(names), found[" + ".join(names)], flush=True)
    content = {"command": "python -m benchmarks.mixture", "images": len(target), "nll": found}
    (RESULTS / "mixture.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
