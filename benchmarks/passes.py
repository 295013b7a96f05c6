"""How many passes over the training images a fit of BayesAdapter and iBNN should make.

    BAYESIFY_DATA=../shared/data python benchmarks/passes.py NETWORK PASSES [--seed 0]

NETWORK is resnet20 or resnet56. Fits the mixture of methods with its defaults, but for so many
passes of BayesAdapter and iBNN, and notes the NLL of held-out training images under strong
augmentation: no test set is read. Adds to benchmarks/results/passes.json.
"""

import argparse
import json
import time
from pathlib import Path

from torch.utils.data import DataLoader

import bayesify
from bayesify import IBNN, BayesAdapter, Mixture
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

FILE = Path(__file__).parent / "results" / "passes.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("resnet20", "resnet56"))
    parser.add_argument("passes", type=int)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    BayesAdapter.epochs = IBNN.epochs = asked.passes
    data = load_data("cifar10:train", normalise=CIFAR10_NORMALISATION)
    bnn = bayesify.convert(load_model(f"cifar10-{asked.network}"), Mixture())
    started = time.monotonic()
    fitted = bnn.fit(
        DataLoader(data, batch_size=64, shuffle=True),
        augment="crop-flip",
        mirror=False,
        precision="bf16",
        normalisation=CIFAR10_NORMALISATION,
        seed=asked.seed,
    )
    print(fitted)
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    results[f"{asked.network} {asked.passes} --seed {asked.seed}"] = {
        "seconds": time.monotonic() - started,
        "held_out_nll": {
            "network": fitted.network_nll,
            **{
                type(part).__name__: {"kept": found.kept, "nll": found.nll}
                for part, found in zip(bnn.method.parts, fitted.parts, strict=True)
            },
            "Mixture": fitted.nll,
        },
    }
    FILE.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
