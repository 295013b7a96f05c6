import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import MAP, Method, Temperature, UnknownSiteError
from bayesify.batches import as_inputs

BOTH = pytest.mark.parametrize("method", [MAP(), Temperature()], ids=["map", "temperature"])


@pytest.fixture
def overconfident(trained: nn.Module) -> nn.Module:
    """A network whose logits are three times too large."""
    network = copy.deepcopy(trained)
    with torch.no_grad():
        network[8].weight.mul_(3)
        network[8].bias.mul_(3)
    return network


@BOTH
def test_predictions_are_the_networks(method: Method, cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, method)
    with torch.no_grad():
        expected = cnn(images).softmax(1)
    prediction = bnn.predict(images)
    torch.testing.assert_close(prediction.probs, expected)
    assert torch.equal(next(bnn.outputs(as_inputs(images)))[0], cnn(images)), "bit for bit"
    assert (prediction.epistemic == 0).all()
    torch.testing.assert_close(bnn(images).exp(), expected)
    assert torch.equal(bnn.sample(3, 5)(images), cnn(images))
    assert not bnn.trainable()


@BOTH
def test_more_draws_say_the_same(method: Method, cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, method)
    one, many = bnn.predict(images), bnn.predict(images, draws=7, seed=3, keep_draws=True)
    torch.testing.assert_close(many.probs, one.probs)
    bnn.noise = 2.0
    assert torch.equal(bnn.predict(images).probs, one.probs)


@BOTH
def test_they_come_back(method: Method, cnn: nn.Module, images: Tensor, tmp_path: Path) -> None:
    bnn = bayesify.convert(cnn, method)
    bnn.temperature = 1.7
    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", cnn)
    assert loaded.method == method
    assert loaded.temperature == 1.7
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)


@BOTH
def test_plan_and_where(method: Method, cnn: nn.Module) -> None:
    plan = bayesify.plan(cnn, method)
    assert (plan.sites, plan.random_numbers, plan.trainable) == ((), 0, 0)
    assert "0 of 0" in str(plan)
    with pytest.raises(UnknownSiteError, match="Drop where="):
        bayesify.convert(cnn, method, where="8.*")


def test_fitting_a_map_trains_nothing_and_says_so(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    bnn = bayesify.convert(trained, MAP())
    result = bnn.fit(loader, validation=validation, progress=False, epochs=5)
    assert result.steps == 0
    assert result.kept == "network"
    assert result.nll == result.network_nll == result.untrained_nll
    assert str(result).startswith("no training steps; held-out NLL")
    assert bnn.temperature == 1
    x, y = validation.dataset.tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(trained(x), y).item()
    assert result.nll == pytest.approx(expected, rel=1e-5)


def test_fit_finds_the_temperature_that_calibrate_finds(
    overconfident: nn.Module, loader: DataLoader, validation: DataLoader, test_set: DataLoader
) -> None:
    bnn = bayesify.convert(overconfident, Temperature())
    result = bnn.fit(loader, validation=validation, progress=False)
    other = bayesify.convert(overconfident, MAP())
    calibration = other.calibrate(validation)
    assert bnn.temperature == calibration.temperature
    assert (bnn.slope, calibration.slope) == (0, 0)  # divided by one number
    assert bnn.temperature > 1.5
    assert result.steps == 0
    assert result.tempered_nll == pytest.approx(calibration.nll, rel=1e-5)
    assert result.tempered_nll < result.network_nll
    assert "at a temperature of" in str(result)
    plain = bayesify.convert(overconfident, MAP()).evaluate(test_set)
    tempered = bnn.evaluate(test_set)
    assert tempered.nll < plain.nll
    assert tempered.accuracy == plain.accuracy


def test_fit_never_does_worse_than_the_network(
    overconfident: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    """Of a network that is calibrated already, the temperature stays."""
    bnn = bayesify.convert(overconfident, Temperature())
    bnn.fit(loader, validation=validation, progress=False)
    calibrated = copy.deepcopy(overconfident)
    with torch.no_grad():
        calibrated[8].weight.div_(bnn.temperature)
        calibrated[8].bias.div_(bnn.temperature)
    again = bayesify.convert(calibrated, Temperature())
    result = again.fit(loader, validation=validation, progress=False)
    assert result.tempered_nll <= result.network_nll
    assert again.temperature == pytest.approx(1, abs=0.05)


def test_regression_is_tempered_too() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(40, 4), torch.randn(40)
    bnn = bayesify.convert(network, Temperature(), likelihood="regression")
    result = bnn.fit([(x, y)], validation=[(x, y)], progress=False)
    assert result.nll <= result.network_nll


@BOTH
def test_checkpoints(
    method: Method,
    overconfident: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    tmp_path: Path,
) -> None:
    def run() -> tuple[object, float]:
        bnn = bayesify.convert(overconfident, method)
        file = tmp_path / "fit"
        result = bnn.fit(loader, validation=validation, checkpoint=file, progress=False)
        return (result.nll, result.kept, len(result.history)), bnn.temperature

    assert run() == run()
