import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import CorruptFileError, DeepEnsemble, SettingError, WrongNetworkError
from bayesify.methods import make_method
from conftest import small_cnn

# A few steps on little data may not help, and then the network itself is kept.
pytestmark = pytest.mark.filterwarnings("ignore:training did not help")


@pytest.fixture
def networks(cnn: nn.Module) -> list[nn.Module]:
    """Three networks with weights and running statistics of their own."""
    made = [copy.deepcopy(cnn) for _ in range(3)]
    with torch.no_grad():
        for network in made:
            for name, tensor in network.state_dict().items():
                if name.endswith("var"):
                    tensor.mul_(0.5 + torch.rand_like(tensor))
                elif tensor.is_floating_point():
                    tensor.add_(0.3 * torch.randn_like(tensor))
    return made


def mean_of(networks: list[nn.Module], images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([network(images).softmax(1) for network in networks]).mean(0)


# Of checkpoints


def test_prediction_is_the_mean_of_the_checkpoints_own(
    cnn: nn.Module,
    networks: list[nn.Module],
    images: Tensor,
    tmp_path: Path,
    untouched: Callable[..., Any],
) -> None:
    file = tmp_path / "third.safetensors"
    save_file(networks[2].state_dict(), file)
    given = [networks[0], networks[1].state_dict(), file]
    with untouched(cnn), untouched(networks[0]), untouched(networks[1]):
        bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=given))
        found = bnn.predict(images, keep_draws=True)
        assert (bnn.method.members, bnn.method.draws) == (3, 3)
        torch.testing.assert_close(found.probs, mean_of(networks, images))
        for member, network in enumerate(networks):
            assert torch.equal(bnn.sample(index=member)(images), network(images))
            assert torch.equal(bnn.sample(seed=9, index=member + 3)(images), network(images))


def test_running_statistics_are_each_members_own(cnn: nn.Module, images: Tensor) -> None:
    other = copy.deepcopy(cnn)
    other[1].running_mean += 1
    bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=[cnn, other]))
    found = bnn.predict(images, keep_draws=True).draws
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    torch.testing.assert_close(found[1], other(images).softmax(1).detach())


@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0, 3.0])
def test_noise_is_a_factor_on_the_distance_from_the_mean(
    cnn: nn.Module, networks: list[nn.Module], images: Tensor, noise: float
) -> None:
    bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=networks, noise=noise))
    states = [network.state_dict() for network in networks]
    draws = bnn.posterior.draws(0, range(3))
    for name, value in draws.items():
        members = torch.stack([state[name] for state in states])
        # Statistics are not extrapolated: at 3, some variance here would be negative.
        factor = min(noise, 1.0) if "running" in name else noise
        expected = members.mean(0) + factor * (members - members.mean(0))
        torch.testing.assert_close(value, expected)
        assert noise != 1 or torch.equal(value, members)
        assert noise != 0 or torch.equal(value[0], value[2])
    assert bnn.predict(images).probs.isfinite().all()


def test_checkpoints_are_not_trained(
    cnn: nn.Module, networks: list[nn.Module], loader: DataLoader, validation: DataLoader
) -> None:
    bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=networks))
    before = copy.deepcopy(bnn.state_dict())
    result = bnn.fit(loader, validation=validation, progress=False)
    assert result.steps == 0
    assert not bnn.trainable()
    assert bayesify.plan(cnn, bnn.method).trainable == 0
    assert bayesify.plan(cnn, bnn.method).random_numbers == 0
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())


def test_loading_needs_no_checkpoint(
    cnn: nn.Module, networks: list[nn.Module], images: Tensor, tmp_path: Path
) -> None:
    files = [tmp_path / f"{member}.safetensors" for member in range(3)]
    for file, network in zip(files, networks, strict=True):
        save_file(network.state_dict(), file)
    bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=files))
    bnn.save(tmp_path / "bnn")
    for file in files:
        file.unlink()
    loaded = bayesify.load(tmp_path / "bnn", cnn)
    assert loaded.method == bnn.method
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)
    again = copy.deepcopy(bnn)
    assert torch.equal(again.predict(images).probs, bnn.predict(images).probs)


def test_some_layers_only(cnn: nn.Module, networks: list[nn.Module], images: Tensor) -> None:
    bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=networks), where=2)
    assert [site.name for site in bnn.sites] == ["8.weight", "8.bias"]
    mixed = copy.deepcopy(cnn)
    mixed[8] = networks[1][8]
    assert torch.equal(bnn.sample(index=1)(images), mixed(images))


def test_types_of_checkpoints_follow_the_networks(
    cnn: nn.Module, networks: list[nn.Module], images: Tensor
) -> None:
    halves = [{n: t.to(torch.bfloat16) for n, t in net.state_dict().items()} for net in networks]
    bnn = bayesify.convert(cnn, DeepEnsemble(checkpoints=halves))
    assert bnn.predict(images).probs.dtype == torch.float32
    assert torch.equal(bnn.sample(index=1)[0].weight, halves[1]["0.weight"].float())


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [
        (small_cnn(classes=7), r"\[1\].*'8.weight' has shape \[7, 8\] there and \[4, 8\] here"),
        (nn.Sequential(nn.Linear(2, 3)), r"\[1\].*'1.weight' is missing.*and \d+ more"),
        (nn.Sequential(*small_cnn(), nn.Linear(4, 4)), r"\[1\].*'9.weight' is unknown"),
        (
            {f"module.{n}": t for n, t in small_cnn().state_dict().items()},
            r"'0.weight' is missing",
        ),
    ],
    ids=["shape", "missing", "unknown", "prefix"],
)
def test_checkpoints_of_another_network(
    cnn: nn.Module, checkpoint: Any, match: str, untouched: Callable[..., Any]
) -> None:
    with untouched(cnn), pytest.raises(WrongNetworkError, match=match):
        bayesify.convert(cnn, DeepEnsemble(checkpoints=[cnn, checkpoint]))


@pytest.mark.parametrize(
    ("checkpoints", "match"),
    [
        (small_cnn(), r"is a Sequential: write checkpoints=\[...\]"),
        ("a.safetensors", "is a str: write"),
        (3, "is a int: write"),
        ([3], r"checkpoints\[0\] is a int"),
        (["old.pt"], r"torch.load\('old.pt', weights_only=True\)"),
        ([{"state_dict": {}, "epoch": 3}], r"'state_dict' is a dict.*checkpoint\['state_dict'\]"),
    ],
)
def test_what_is_no_checkpoint(checkpoints: Any, match: str) -> None:
    with pytest.raises(SettingError, match=match):
        DeepEnsemble(checkpoints=checkpoints)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="cannot be read"):
        DeepEnsemble(checkpoints=[tmp_path / "none.safetensors"])


# Settings


def test_draws_follow_members(networks: list[nn.Module]) -> None:
    assert DeepEnsemble(members=5).draws == 5
    assert DeepEnsemble(members=2, draws=4).draws == 4
    with pytest.raises(SettingError, match="draws=4 is not a multiple of the 3 members"):
        DeepEnsemble(draws=4)
    with pytest.raises(SettingError, match="members=5 contradicts the 2 checkpoints"):
        DeepEnsemble(members=5, checkpoints=networks[:2])
    with pytest.raises(SettingError, match="members=0"):
        DeepEnsemble(members=0)


def test_settings_go_through_json(networks: list[nn.Module]) -> None:
    method = DeepEnsemble(checkpoints=networks[:2], lr=0.1)
    written = json.loads(json.dumps(method.to_dict()))
    assert written["members"] == 2
    assert written["checkpoints"] == []
    assert make_method("deep-ensemble", written) == method
    assert len(repr(method)) < 200


# Fine-tuned


def test_untrained_members_are_the_network(
    cnn: nn.Module, images: Tensor, untouched: Callable[..., Any]
) -> None:
    with untouched(cnn):
        bnn = bayesify.convert(cnn, DeepEnsemble(members=7))
        for noise in (0.0, 0.3, 1.0):
            bnn.noise = noise
            for value in bnn.posterior.draws(0, range(7)).values():
                assert all(torch.equal(member, value[0]) for member in value)
            assert torch.equal(bnn.sample(index=5)(images), cnn(images))


def test_bootstraps() -> None:
    method = DeepEnsemble(members=2)
    counts = method.example_weights(0, 1000, seed=3)
    assert counts.sum() == 1000
    assert torch.equal(counts, method.example_weights(0, 1000, seed=3))
    assert not torch.equal(counts, method.example_weights(1, 1000, seed=3))
    assert not torch.equal(counts, method.example_weights(0, 1000, seed=4))
    # An example is left out with probability 1/e; the standard error is about 0.01.
    assert abs((counts == 0).float().mean() - math.exp(-1)) < 0.04


def test_fine_tuned_members_differ_and_improve(
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    test_set: DataLoader,
    images: Tensor,
    tmp_path: Path,
    untouched: Callable[..., Any],
) -> None:
    with untouched(trained):
        bnn = bayesify.convert(trained, DeepEnsemble(members=3, lr=0.01))
        before = bnn.evaluate(test_set).nll
        result = bnn.fit(loader, epochs=4, validation=validation, progress=False)
    assert result.kept.startswith("step")
    assert result.groups == 1
    assert result.nll < result.network_nll
    assert bnn.evaluate(test_set).nll < before
    for name, value in bnn.posterior.weights.items():
        assert not torch.equal(value[0], value[1]), name
    for name, value in bnn.posterior.running.items():
        assert torch.equal(value[1], trained.state_dict()[name]), name
    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", trained)
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)


def test_gradients_are_each_members_on_its_bootstrap(
    trained: nn.Module, loader: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without momentum and decay, a step moves each member by its own weighted gradient."""
    x, y = next(iter(loader))
    method = DeepEnsemble(members=2)
    bnn = bayesify.convert(trained, method)
    seeds: dict[int, int] = {}
    moved: dict[str, Tensor] = {}
    bootstrap = DeepEnsemble.example_weights

    def note(self: DeepEnsemble, turn: int, count: int, seed: int) -> Tensor:
        seeds[turn] = seed
        return bootstrap(self, turn, count, seed)

    class Plain(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            moved.update({n: p.grad.clone() for n, p in bnn.posterior.weights.items()})

    monkeypatch.setattr(DeepEnsemble, "example_weights", note)
    monkeypatch.setattr(DeepEnsemble, "optimizer", lambda self, p, _: Plain(p.parameters(), 0.1))
    bnn.fit([(x, y)], validation=[(x, y)], progress=False)
    for member in range(2):
        counts = method.example_weights(member, len(y), seeds[member])
        network = copy.deepcopy(trained)
        losses = nn.functional.cross_entropy(network(x), y, reduction="none")
        (losses * counts).mean().backward()
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(moved[name][member], parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_finished_fit_is_not_done_again(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path
) -> None:
    def run() -> tuple[Any, dict[str, Tensor]]:
        bnn = bayesify.convert(trained, DeepEnsemble(members=2, lr=0.01))
        file = tmp_path / "fit"
        result = bnn.fit(loader, validation=validation, checkpoint=file, progress=False)
        return result, bnn.state_dict()

    (first, expected), (second, found) = run(), run()
    assert first == second
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
