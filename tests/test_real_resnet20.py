"""On the public ResNet-20 checkpoint and real images; benchmarks/resnet20.py measures all of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import bayesify
from bayesify import ABNN
from bayesify.batches import as_inputs
from bayesify.calibration import averaged, best_temperature
from bayesify.cli import app
from bayesify.data import CIFAR10_NORMALISATION, load_data
from bayesify.zoo import load_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("BAYESIFY_DATA" not in os.environ, reason="BAYESIFY_DATA is not set"),
]


def loader(spec: str, batch_size: int = 250, *, shuffle: bool = False) -> DataLoader[Any]:
    data = load_data(spec, normalise=CIFAR10_NORMALISATION)
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


@pytest.fixture(scope="module")
def resnet20() -> nn.Module:
    return load_model("cifar10-resnet20")


def test_without_noise_it_is_the_network(
    resnet20: nn.Module, untouched: Callable[..., object]
) -> None:
    with untouched(resnet20):
        bnn = bayesify.convert(resnet20, ABNN(noise=0.0))
        baked = bnn.sample(0)
        right = 0
        with torch.no_grad():
            for x, y in loader("cifar10:test"):
                logits = resnet20(x)
                assert torch.equal(baked(x), logits)
                assert torch.equal(next(bnn.outputs(as_inputs(x), draws=3))[0], logits)
                right += int((logits.argmax(1) == y).sum())
        assert right == 9260


def test_strategies_agree(resnet20: nn.Module) -> None:
    bnn = bayesify.convert(resnet20, ABNN(draws=6))
    x, _ = next(iter(loader("cifar10:test[:8]")))
    bnn.strategy = "vectorised"
    vectorised = bnn.predict(x)
    bnn.strategy = "looped"
    torch.testing.assert_close(bnn.predict(x).probs, vectorised.probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        bnn.predict(x, batch_size=3).probs, vectorised.probs, atol=1e-5, rtol=1e-5
    )


def test_calibration_alone_beats_the_network(resnet20: nn.Module) -> None:
    """A check of the machinery on few images; no default is chosen by it."""
    network = bayesify.convert(resnet20, ABNN(members=1, draws=1, noise=0.0))
    x, y = next(iter(loader("cifar10:test[:500]", 500)))
    with torch.no_grad():
        outputs = torch.cat(list(network.outputs(as_inputs(x))))
        averages = averaged(network.likelihood, outputs)
        _, scaled = best_temperature(network.likelihood, averages, y)
    bnn = bayesify.convert(resnet20, ABNN(draws=12))
    chosen = bnn.calibrate(loader("cifar10:test[:500]"))
    assert chosen.noise > 0
    assert chosen.nll < scaled
    test, ood = "cifar10:test[500:1250]", {"svhn": loader("svhn[:750]")}
    before, after = network.evaluate(loader(test), ood=ood), bnn.evaluate(loader(test), ood=ood)
    assert after.nll < before.nll - 0.02
    assert after.ece < before.ece
    assert after.accuracy > before.accuracy - 0.01
    assert after.ood["svhn"].auroc > before.ood["svhn"].auroc


def test_fit_on_training_images(
    resnet20: nn.Module, tmp_path: Path, untouched: Callable[..., object]
) -> None:
    with untouched(resnet20):
        bnn = bayesify.convert(resnet20, ABNN())
        result = bnn.fit(
            loader("cifar10:train[:1280]", 128, shuffle=True), augment="crop-flip", progress=False
        )
        assert result.nll <= min(result.network_nll, result.untrained_nll)
        assert result.untrained_nll < result.network_nll
        bnn.save(tmp_path / "bnn")
        loaded = bayesify.load(tmp_path / "bnn", resnet20)
    x, _ = next(iter(loader("cifar10:test[:20]")))
    assert torch.equal(loaded.predict(x).probs, bnn.predict(x).probs)
    size = (tmp_path / "bnn" / "posterior.safetensors").stat().st_size
    assert size < 40_000


def test_the_command_line_knows_how_its_images_are_normalised(
    resnet20: nn.Module, tmp_path: Path
) -> None:
    bayesify.convert(resnet20, ABNN(draws=3)).save(tmp_path / "bnn")
    found = tmp_path / "found.json"
    arguments = ["evaluate", tmp_path / "bnn", "cifar10-resnet20", "cifar10:test[:100]"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--output", str(found)])
    assert result.exit_code == 0, result.output
    assert json.loads(found.read_text())["network"]["accuracy"] > 0.85
