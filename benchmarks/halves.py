"""How low an ECE can be after `calibrate` on half of the test images. No test label is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.halves cifar10-resnet20 Mirroring

What a method says of the test images, as it was fitted, is taken for the truth: labels are drawn
from it, so that it is calibrated perfectly. Then one temperature is chosen by one half and the ECE
measured on the other, both ways round, as in `make bench-quality` (where it has a slope too): what
is left is the luck of 5,000 labels that measure and of those that calibrate. Adds to
benchmarks/results/halves.json, by network and method: mean and standard deviation over drawn
labels, and how often the ECE is no more than what is sought.
"""

import argparse
import json
import statistics

import torch
from torch import Tensor

from bayesify import BayesianModel
from bayesify.calibration import MOST_EXAMPLES, best_temperature
from benchmarks.quality.bars import BARS
from benchmarks.quality.headline import fitted, predicted
from benchmarks.quality.measures import perfect_ece, pooled_ece, quality
from benchmarks.quality.results import RESULTS, write_json
from benchmarks.quality.settings import FULL, METHODS
from benchmarks.quality.units import Unit

FILE = RESULTS / "halves.json"
TIMES = 500


@torch.no_grad()
def measured(bnn: BayesianModel, truth: Tensor, seed: int) -> dict[str, float]:
    """The same figures as of real labels, for labels that are drawn from the predictions."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.multinomial(truth, 1, generator=generator).squeeze(1)
    # The second is asked for with the first, and no temperature or probability depends on it.
    averages = {"probs": truth, "aleatoric": torch.zeros(len(truth))}
    halves = (slice(len(truth) // 2), slice(len(truth) // 2, None))
    found = []
    for own, other in (halves, halves[::-1]):
        seen = {name: value[own][:MOST_EXAMPLES] for name, value in averages.items()}
        temperature, _ = best_temperature(bnn.likelihood, seen, target[own][:MOST_EXAMPLES])
        rest = {name: value[other] for name, value in averages.items()}
        found.append(quality(bnn.likelihood.pool(rest, temperature)["probs"], target[other]))
    return {
        "mean of halves": statistics.fmean(half["ece"] for half in found),
        "pooled": pooled_ece([half["bins"] for half in found]),
        "not calibrated": quality(truth, target)["ece"],
        "mean of halves, if perfect": statistics.fmean(perfect_ece(half["bins"]) for half in found),
    }


def summary(values: list[float], sought: float) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "standard deviation": statistics.stdev(values),
        f"share of {sought} or less": statistics.fmean(value <= sought for value in values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=FULL.networks)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    unit = Unit(given.network, given.method, given.seed, "fit")
    bnn, _ = fitted(unit, FULL)
    truth, _ = predicted(bnn, unit, FULL, "cifar10:test", slice(FULL.test))
    rows = [measured(bnn, truth, seed) for seed in range(TIMES)]
    sought = BARS[given.network][2]
    found = {name: summary([row[name] for row in rows], sought) for name in rows[0]}
    content = json.loads(FILE.read_text()) if FILE.exists() else {}
    content.setdefault(given.network, {})[f"{given.method}, seed {given.seed}"] = found
    write_json(FILE, content)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
