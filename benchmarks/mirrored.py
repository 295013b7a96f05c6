"""How much noise mirrored draws should have. By training images: no test set is read.

    BAYESIFY_DATA=../shared/data python -m benchmarks.mirrored [--seeds 0 1 2]

A small network is trained on 50,000 training images of Fashion-MNIST, and the mixture fitted to it
as `fit(augment="crop-flip")` does, with half of the draws mirrored. At several fractions of the
noise of training, the temperature is chosen as a fit's end chooses it, by 2,000 of these images
under strong augmentation; judged is by the other 10,000 training images, as they are, which nothing
has seen, and by how well predictive entropy tells them from letters. So it is also asked whether
what strongly augmented images say holds for others. Writes benchmarks/results/mirrored.json.
"""

import argparse
import json
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Mixture
from bayesify.calibration import Search, best_temperature
from bayesify.data import load_data
from bayesify.evaluation.detection import auroc
from bayesify.posterior import key
from bayesify.validation import hold_out
from benchmarks.pooling import FASHION, LETTERS, trained
from benchmarks.quality.measures import entropy, quality
from benchmarks.quality.results import RESULTS

FRACTIONS = (1.0, 2**-0.5, 0.5, 2**-1.5, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    data: Any = load_data("fashion-mnist:train", normalise=FASHION)
    x, y = (torch.cat(part) for part in zip(*DataLoader(data, batch_size=1000), strict=True))
    letters: Any = load_data(LETTERS, normalise=FASHION)
    strange = torch.stack([letters[row][0] for row in range(len(letters))])
    network = trained(TensorDataset(x[:50_000], y[:50_000]))
    found = []
    for seed in seeds:
        loader = DataLoader(TensorDataset(x[:50_000], y[:50_000]), batch_size=64, shuffle=True)
        bnn = bayesify.convert(network, Mixture())
        bnn.fit(loader, augment="crop-flip", temper=False, seed=seed, progress=False)
        bnn.mirrored = True
        held = hold_out(loader, seed)[1]
        for fraction in FRACTIONS:
            bnn.noise = fraction * bnn.method.noise
            search = Search(bnn, held.batches, bnn.method.draws, key("judge", seed))
            averages = search.averages(bnn.noise)
            bnn.temperature, nll = best_temperature(bnn.likelihood, *averages)
            probs, others = (
                bnn.predict(images, seed=seed).probs for images in (x[50_000:], strange)
            )
            judged = quality(probs, y[50_000:])
            judged.pop("bins")
            judged["auroc"] = auroc(entropy(probs), entropy(others))
            row = {"seed": seed, "fraction": fraction, "temperature": bnn.temperature, **judged}
            found.append({**row, "nll, strongly augmented": nll})
            print({name: round(value, 4) for name, value in found[-1].items()}, flush=True)
    (RESULTS / "mirrored.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
