import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from architectures import ARCHITECTURES, Architecture
from bayesify import (
    ABNN,
    IBNN,
    MAP,
    BayesAdapter,
    BayesianModel,
    MCDropout,
    Method,
    Mixture,
    SettingError,
    UnknownSiteError,
)
from bayesify.methods import make_method
from bayesify.methods.mixture import Parts
from bayesify.mixing import remove_checkpoint
from bayesify.posterior import Latent, MeanField
from bayesify.validation import collect

# A few steps on little data may not help, and then the network itself is kept.
pytestmark = pytest.mark.filterwarnings("ignore:training did not help")
ADAPTER, INPUTS = BayesAdapter(lr=3e-3, psi_lr=3e-2), IBNN(components=2, lr=3e-3, latent_lr=3e-2)
METHOD = Mixture(parts=[ADAPTER, INPUTS], draws=8)


def tensors(posterior: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in posterior.state_dict().items()}


def parts(bnn: BayesianModel) -> Parts:
    assert isinstance(bnn.posterior, Parts)
    return bnn.posterior


@pytest.fixture
def fitted(trained: nn.Module, loader: DataLoader, validation: DataLoader) -> BayesianModel:
    bnn = bayesify.convert(trained, METHOD)
    bnn.fit(loader, validation=validation, epochs=2, keep="last", progress=False)
    return bnn


def test_parts_are_fitted_as_they_would_be_alone(
    fitted: BayesianModel, trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    for method, part in zip(METHOD.parts, parts(fitted).members(), strict=True):
        alone = bayesify.convert(trained, method)
        start = tensors(alone.posterior)
        alone.fit(loader, validation=validation, epochs=2, keep="last", progress=False)
        expected, found = tensors(alone.posterior), tensors(part)
        assert found.keys() == expected.keys()
        assert any(name.startswith("statistics") for name in found)
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert any(not torch.equal(found[name], start[name]) for name in found)


def test_fit_and_predict_leave_the_network_alone(
    trained: nn.Module, loader: DataLoader, untouched: Callable[..., Any]
) -> None:
    with untouched(trained):
        bnn = bayesify.convert(trained, METHOD)
        bnn.fit(loader, epochs=1, progress=False)
        bnn.predict(next(iter(loader))[0])


def test_prediction_is_the_mean_over_parts_of_the_means_over_draws(
    fitted: BayesianModel, images: Tensor
) -> None:
    fitted.temperature = 1.0
    found = fitted.predict(images, keep_draws=True, seed=3)
    assert found.draws is not None
    with torch.no_grad():
        each = [fitted.sample(3, index)(images).softmax(1) for index in range(8)]
    torch.testing.assert_close(found.draws, torch.stack(each))
    torch.testing.assert_close(found.probs, torch.stack(each).mean(0))


def test_draws_take_turns_over_parts_and_their_components(fitted: BayesianModel) -> None:
    draws = fitted.posterior.draws(0, range(8))
    weight, gate = draws["0.weight"], draws["0.input_scale"]
    adapter, inputs = parts(fitted).members()
    assert isinstance(adapter, MeanField)
    assert isinstance(inputs, Latent)
    for index in range(8):
        if index % 2:
            assert torch.equal(weight[index], inputs.shared()["0.weight"])
            component = index // 2 % 2
            mean, std = inputs.mean["0.input_scale"], inputs.rho["0.input_scale"]
            distance = (gate[index] - mean[component]).abs()
            assert (distance < 5 * nn.functional.softplus(std[component])).all()
        else:
            assert torch.equal(gate[index], torch.ones_like(gate[index]))
            assert not torch.equal(weight[index], adapter.mean["0.weight"])
    for odd in (0, 1):
        running = draws["1.running_mean"][odd::2]
        own = (adapter, inputs)[odd].statistics["1.running_mean"]
        assert torch.equal(running, own.expand_as(running))
    one = fitted.posterior.draws(0, [5])
    assert all(torch.equal(value[0], draws[name][5]) for name, value in one.items())


def test_no_noise_is_each_part_without_noise(fitted: BayesianModel, images: Tensor) -> None:
    fitted.noise = 0.0
    a, b = (fitted.sample(0, index).state_dict() for index in (0, 8))
    assert all(torch.equal(a[name], b[name]) for name in a)
    fitted.noise = 0.5
    assert [part.noise for part in parts(fitted).members()] == [0.5, 0.5]
    assert bool((fitted.predict(images).epistemic > 0).any())


def test_it_is_at_least_as_likely_as_its_parts_are(
    fitted: BayesianModel, trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    held = collect(validation, 0).batches
    fitted.temperature = 1.0
    together, _ = fitted.judge(held, draws=400, seed=0)
    alone = []
    for method in METHOD.parts:
        bnn = bayesify.convert(trained, method)
        bnn.fit(loader, validation=validation, epochs=2, keep="last", temper=False, progress=False)
        alone.append(bnn.judge(held, draws=200, seed=0)[0])
    assert together < sum(alone) / 2 + 0.01


def test_a_part_that_does_not_help_is_the_network(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path
) -> None:
    ruined = ABNN(members=1, draws=2, noise=3.0, lr=0.0)
    bnn = bayesify.convert(trained, Mixture(parts=[ruined, ADAPTER], draws=4))
    result = bnn.fit(loader, validation=validation, epochs=1, progress=False)
    assert result.parts[0].kept == "network"
    assert parts(bnn).members()[0].noise == 0
    assert result.nll <= result.network_nll
    assert "together" in str(result)
    bnn.save(tmp_path / "saved")
    again = bayesify.load(tmp_path / "saved", trained)
    assert parts(again).members()[0].noise == 0


def test_saved_and_loaded_it_says_the_same(
    fitted: BayesianModel, trained: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "saved")
    again = bayesify.load(tmp_path / "saved", trained)
    assert again.method == fitted.method
    assert again.temperature == fitted.temperature
    assert torch.equal(again.predict(images).probs, fitted.predict(images).probs)


def test_a_fit_that_was_stopped_in_its_second_part_goes_on(
    fitted: BayesianModel,
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StoppedError(Exception):
        pass

    def stop(_method: Method, _posterior: object, step: int, _steps: int) -> None:
        if step == 7:
            raise StoppedError

    file = tmp_path / "fit.safetensors"
    settings: dict[str, Any] = {
        "validation": validation, "epochs": 2, "keep": "last", "progress": False,
        "checkpoint": file, "checkpoint_seconds": 0.0,
    }  # fmt: skip
    bnn = bayesify.convert(trained, METHOD)
    with monkeypatch.context() as patch:
        patch.setattr(IBNN, "after_step", stop)
        with pytest.raises(StoppedError):
            bnn.fit(loader, **settings)
    with monkeypatch.context() as patch:
        # Nothing of the first part is trained again.
        patch.setattr(BayesAdapter, "after_step", stop)
        bnn = bayesify.convert(trained, METHOD)
        bnn.fit(loader, **settings)
    expected, found = tensors(fitted.posterior), tensors(bnn.posterior)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert bnn.temperature == fitted.temperature
    assert len(list(tmp_path.iterdir())) == 2
    remove_checkpoint(file)
    assert not list(tmp_path.iterdir())


def test_parts_may_make_the_same_tensors_random(trained: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(trained, Mixture(parts=[ABNN(noise=0.2), ADAPTER], draws=6))
    assert [part.noise for part in parts(bnn).members()] == [0.2, 1.0]
    norm = "1.weight"
    both = [site for site in bnn.sites if site.name == norm]
    assert len(both) == 2
    assert bnn.predict(images).probs.isfinite().all()
    draws = bnn.posterior.draws(0, range(6))[norm]
    assert draws[::2].std(0).mean() > 5 * draws[1::2].std(0).mean()


@pytest.mark.parametrize("strategy", ["looped", "vectorised", "folded", "stacked"])
def test_all_strategies_say_the_same(fitted: BayesianModel, images: Tensor, strategy: str) -> None:
    fitted.strategy = "looped"
    expected = fitted.predict(images).probs
    fitted.strategy = strategy
    torch.testing.assert_close(fitted.predict(images).probs, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*performance drop")  # torch, of kernels under vmap
@pytest.mark.parametrize("architecture", ARCHITECTURES[::6], ids=str)
def test_architectures(architecture: Architecture) -> None:
    torch.manual_seed(0)
    network, x = architecture.build().eval(), architecture.example()
    bnn = bayesify.convert(network, Mixture(draws=12), likelihood=architecture.likelihood)
    found = bnn.predict(x)
    assert found.uncertainty.isfinite().all()
    assert bool((found.epistemic > 0).any())
    bnn.strategy = "looped"
    torch.testing.assert_close(bnn.predict(x).uncertainty, found.uncertainty, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": [ADAPTER]}, "two parts or more"),
        ({"parts": "abnn"}, "two parts or more"),
        ({"parts": 3}, "must be a list"),
        ({"parts": '["abnn", "ibnn"]'}, "is not known. The methods are"),
        ({"parts": [ADAPTER, 3]}, "has 3"),
        ({"parts": [ADAPTER, Mixture()]}, "neither a method"),
        ({"parts": ["abnn", "nonsense"]}, "'nonsense' is not known"),
        ({"draws": 8}, "not a multiple of the 12"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Mixture(**settings)


def test_parts_that_get_in_each_others_way_are_refused(trained: nn.Module) -> None:
    with pytest.raises(SettingError, match="as another part of the mixture does"):
        bayesify.convert(trained, Mixture(parts=[IBNN(), MCDropout()], draws=8))
    with pytest.raises(UnknownSiteError, match="MAP, a part of the mixture"):
        bayesify.convert(trained, Mixture(parts=[MAP(), ADAPTER], draws=2))
    with pytest.raises(UnknownSiteError, match="IBNN, a part of the mixture"):
        bayesify.convert(trained, METHOD, where="*.weight")
    with pytest.raises(SettingError, match="does not train on OOD data"):
        bayesify.convert(trained, METHOD).fit([], ood=[])


def test_settings_go_into_json_and_come_back() -> None:
    stored = json.loads(json.dumps(METHOD.to_dict()))
    assert make_method("mixture", stored) == METHOD
    for parts in (["bayes-adapter", "ibnn"], "bayes-adapter, ibnn"):
        assert make_method("mixture", {"parts": parts}).parts == Mixture().parts[1:]
