"""BayesAdapter and iBNN on the public ResNet-20 checkpoint, with their default settings.

    BAYESIFY_DATA=../shared/data python benchmarks/methods_resnet20.py METHOD [--seed 0]

METHOD is bayes-adapter (without regularisation, the paper's BayesAdapter-), the same as the paper
trains it (bayes-adapter-sgd) or with attacks on itself as outliers (bayes-adapter-ood, which wants
--epochs 4 --groups 8 --keep last --noise 1.3), or ibnn. Fits on CIFAR-10 training images alone, no
temperature, then looks at all 10,000 test images and 5,000 SVHN crops.
--pgd attacks 1,000 test images (20 steps of 0.003 within 0.031, through 20 draws) and tells them
from the clean ones by mutual information, and for the network itself by its entropy.
Writes benchmarks/results/resnet20-METHOD-AUGMENT-seed<seed>.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import bayesify
from bayesify import IBNN, MAP, BayesAdapter, BayesianModel, Method
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.evaluation.attacks import detection, pgd
from bayesify.zoo import load_model

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, Method] = {
    "bayes-adapter": BayesAdapter(),
    "bayes-adapter-sgd": BayesAdapter(adapt_statistics=False, adam=False, lr=1e-4, psi_lr=0.1),
    "bayes-adapter-ood": BayesAdapter(
        head_log_std=(-0.5, 0.5),
        ood_radius=0.031,
        ood_steps=8,
        ood_weight=2.0,
        margin=0.65,
        lr=2e-4,
        psi_lr=5e-4,
        adapt_statistics=False,
    ),
    "ibnn": IBNN(),
}
RADIUS, STEP, STEPS, DRAWS = 0.031, 0.003, 20, 20


def loader(spec: str, batch_size: int = 250, *, shuffle: bool = False) -> DataLoader[Any]:
    data = load_data(spec, normalise=CIFAR10_NORMALISATION)
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def attack(bnn: BayesianModel, images: int, score: str) -> dict[str, float]:
    """How well attacked images are told from clean ones."""
    x, y = next(iter(loader(f"cifar10:test[:{images}]", images)))
    draws = min(DRAWS, bnn.method.draws)
    attacked = pgd(
        bnn, x, y, radius=RADIUS, step=STEP, steps=STEPS, draws=draws, seed=1,
        normalisation=CIFAR10_NORMALISATION,
    )  # fmt: skip
    clean, strange = bnn.predict(x, draws=draws), bnn.predict(attacked, draws=draws)
    found = detection(clean, strange, score=score)
    return {
        **found,
        "accuracy_clean": (clean.label == y).float().mean().item(),
        "accuracy_attacked": (strange.label == y).float().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=50_000, help="training images to fit on")
    parser.add_argument("--epochs", type=int, help="by default the method's own number")
    parser.add_argument("--precision", choices=("bf16",), help="of training")
    parser.add_argument("--checkpoint", type=Path, help="file to resume the fit from")
    parser.add_argument("--augment", default="crop-flip", choices=("crop-flip", "strong", "none"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--groups", type=int, help="draws of a training batch")
    parser.add_argument("--keep", default="best", choices=("best", "last"))
    parser.add_argument("--noise", type=float, default=1.0, help="factor on it, after the fit")
    parser.add_argument("--pgd", type=int, default=0, help="test images to attack")
    arguments = parser.parse_args()
    seed, name = arguments.seed, arguments.method
    command = (
        f"python benchmarks/methods_resnet20.py {name} --seed {seed} --train {arguments.train} "
        f"--augment {arguments.augment} --pgd {arguments.pgd} "
        f"--batch-size {arguments.batch_size} --keep {arguments.keep}"
    )
    command += f" --epochs {arguments.epochs}" if arguments.epochs else ""
    command += f" --groups {arguments.groups}" if arguments.groups else ""
    command += f" --noise {arguments.noise:g}" if arguments.noise != 1 else ""
    command += f" --precision {arguments.precision}" if arguments.precision else ""
    method = METHODS[name]
    model = load_model("cifar10-resnet20")
    bnn = bayesify.convert(model, method)
    fitted = bnn.fit(
        loader(f"cifar10:train[:{arguments.train}]", arguments.batch_size, shuffle=True),
        epochs=arguments.epochs,
        augment=None if arguments.augment == "none" else arguments.augment,
        keep=arguments.keep,
        temper=False,
        seed=seed,
        normalisation=CIFAR10_NORMALISATION,
        checkpoint=arguments.checkpoint,
        precision=arguments.precision,
        groups=arguments.groups,
    )
    bnn.noise *= arguments.noise
    results: dict[str, Any] = {
        "command": command,
        "method": repr(method),
        "torch": torch.__version__,
        "fit": str(fitted),
        "fit_seconds": fitted.seconds,
    }
    print(results, flush=True)
    file = RESULTS / f"resnet20-{name}-{arguments.augment}-seed{seed}.json"

    def keep(**more: Any) -> None:
        results.update(more)
        print(json.dumps(more), flush=True)
        file.write_text(json.dumps(results, indent=2) + "\n")

    report = bnn.evaluate(loader("cifar10:test"), ood={"svhn": loader("svhn")}, seed=seed)
    keep(test=report.to_dict())
    if arguments.pgd:
        keep(pgd=attack(bnn, arguments.pgd, "epistemic"))
        network = bayesify.convert(model, MAP())
        keep(pgd_network=attack(network, arguments.pgd, "uncertainty"))


if __name__ == "__main__":
    main()
