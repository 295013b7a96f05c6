"""What mirrored draws bring, and how the noise should follow. By training images alone.

    BAYESIFY_DATA=../shared/data python -m benchmarks.mirrored NETWORK [--seed 0]

NETWORK is resnet20 or resnet56. The mixture as `make bench-quality` fits it (a fit that is in its
cache is taken from there), on the 2,000 training images that `fit` held out, strongly augmented: no
test set is read. On every second of them noise and temperature are chosen, and the others judge,
and the other way round:

    none mirrored       the noise of training, the likeliest temperature that is 1 or more
    mirrored            the same, of mirrored draws
    less noise          noise falls by steps of a factor 1.41 while that is likelier by more than
                        two standard errors, at the likeliest temperature that is 1 or more
    sharper             the noise of training, the likeliest temperature
    less, sharper       noise falls in that way, at the likeliest temperature

Adds to benchmarks/results/mirrored.json.
"""

import json
import math

import torch
from torch import Tensor

from bayesify import BayesianModel
from bayesify.calibration import Trial, as_likely, best_temperature, tempered_losses
from bayesify.posterior import key
from bayesify.validation import HeldOut
from benchmarks.mixture import mixture_asked_for
from benchmarks.quality.measures import quality
from benchmarks.quality.results import RESULTS

STEPS = 4
FILE = RESULTS / "mirrored.json"
RULES = {  # mirrored, lowest temperature, whether noise falls
    "none mirrored": (False, 1.0, False),
    "mirrored": (True, 1.0, False),
    "less noise": (True, 1.0, True),
    "sharper": (True, 0.0, False),
    "less, sharper": (True, 0.0, True),
}


def outputs(bnn: BayesianModel, held: HeldOut, *, mirrored: bool, noise: float) -> Tensor:
    bnn.mirrored, bnn.noise = mirrored, noise
    seed = key("judge", 0)
    return torch.cat([torch.cat(list(bnn.outputs(x, seed=seed))) for x, _ in held.batches], dim=1)


def chosen(
    bnn: BayesianModel, drawn: dict[float, Tensor], target: Tensor, coldest: float, *, falls: bool
) -> Trial:
    """The noise and temperature of a rule, by these examples."""

    def trial(noise: float) -> Trial:
        seen = (bnn.likelihood, drawn[noise], target)
        temperature, _ = best_temperature(*seen, coldest)
        return Trial(noise, temperature, tempered_losses(*seen, temperature), math.nan)

    first, *others = sorted(drawn, reverse=True)
    best = trial(first)
    for noise in others if falls else ():
        less = trial(noise)
        if as_likely(best, less, errors=2.0):
            break
        best = less
    return best


@torch.no_grad()
def main() -> None:
    words, bnn, held, target = mixture_asked_for(__doc__)
    noises = [bnn.method.noise * 2 ** (-step / 2) for step in range(STEPS)]
    drawn = {
        True: {noise: outputs(bnn, held, mirrored=True, noise=noise) for noise in noises},
        False: {noises[0]: outputs(bnn, held, mirrored=False, noise=noises[0])},
    }
    found = {}
    for name, (mirrored, coldest, falls) in RULES.items():
        choices, probs = [], torch.empty(len(target), drawn[True][noises[0]].shape[2])
        for half in range(2):
            own, other = slice(half, None, 2), slice(1 - half, None, 2)
            seen = {noise: logits[:, own] for noise, logits in drawn[mirrored].items()}
            best = chosen(bnn, seen, target[own], coldest, falls=falls)
            choices.append({"noise": best.noise, "temperature": best.temperature})
            logits = drawn[mirrored][best.noise][:, other]
            probs[other] = (logits / best.temperature).softmax(2).mean(0)
        judged = quality(probs, target)
        judged.pop("bins")
        found[name] = {**judged, "chosen": choices}
        print(name, found[name], flush=True)
    content = json.loads(FILE.read_text()) if FILE.exists() else {}
    content[words] = {"method": repr(bnn.method), **found}
    FILE.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
