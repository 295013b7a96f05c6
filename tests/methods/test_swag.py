import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import SWAG, SettingError
from bayesify.methods import make_method
from bayesify.methods.swag import COEFFICIENTS, Trajectory

# A few steps on little data may not help, and then the network itself is kept.
pytestmark = pytest.mark.filterwarnings("ignore:training did not help")


class Recorded(SWAG):
    """SWAG that notes the weights after every step."""

    path: dict[int, dict[str, Tensor]]

    def after_step(self, posterior: Trajectory, step: int, steps: int) -> None:
        weights = posterior.point.weights.items()
        self.path[step] = {name: value.detach().clone() for name, value in weights}
        super().after_step(posterior, step, steps)


def recorded(**settings: Any) -> Recorded:
    method = Recorded(**settings)
    object.__setattr__(method, "path", {})
    return method


def walk(posterior: Trajectory, snapshots: int) -> list[Tensor]:
    """Moves the point at random, far less than the weights are large; returns where it was."""
    places = []
    with torch.no_grad():
        for _ in range(snapshots):
            for weight in posterior.point.parameters():
                weight.add_(1e-3 * torch.randn_like(weight))
            posterior.collect()
            places.append(torch.cat([w.flatten() for w in posterior.point.parameters()]))
    return places


def moments(places: list[Tensor], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and the last deviations from the mean so far, in double precision."""
    stack = torch.stack(places).double()
    so_far = stack.cumsum(0) / torch.arange(1, len(stack) + 1).unsqueeze(1)
    return stack.mean(0), stack.var(0, correction=0), (stack - so_far)[-rank:]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def stacked(draws: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten(1) for value in draws.values()], dim=1)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What is collected


@pytest.mark.parametrize("snapshots", [1, 3, 5, 17])
def test_moments_are_those_of_the_snapshots(snapshots: int) -> None:
    posterior = bayesify.convert(nn.Linear(3, 4), SWAG(rank=5)).posterior
    places = walk(posterior, snapshots)
    mean, variance, deviations = moments(places, 5)
    torch.testing.assert_close(flat(dict(posterior.mean.items())).double(), mean)
    found = flat(dict(posterior.variance.items())).double()
    torch.testing.assert_close(found, variance, atol=1e-11, rtol=1e-3)
    kept = stacked(dict(posterior.deviations.items())).double()
    rows = [place % 5 for place in range(max(0, snapshots - 5), snapshots)]
    torch.testing.assert_close(kept[rows], deviations, atol=1e-7, rtol=1e-4)
    assert not kept[[row for row in range(5) if row not in rows]].any()


@pytest.mark.parametrize("snapshots", [2, 4, 9])
def test_covariance_of_draws(snapshots: int) -> None:
    """Of many draws, against noise^2 (diag / 2 + D D^T / (2 (K - 1)))."""
    torch.manual_seed(3)
    posterior = bayesify.convert(nn.Linear(2, 2), SWAG(rank=4, noise=0.7)).posterior
    places = walk(posterior, snapshots)
    mean, variance, deviations = moments(places, 4)
    columns = min(4, snapshots)
    expected = variance.diag() / 2 + deviations.T @ deviations / (2 * (columns - 1))
    expected *= 0.7**2
    count = 200_000
    noise = {name: torch.randn(count, *shape) for name, shape in posterior.shapes().items()}
    draws = stacked(posterior(torch.zeros(count, dtype=torch.long), noise)).double() - mean
    spread = expected.diag().sqrt()
    found = draws.T @ draws / count
    # The standard error of a covariance is at most sqrt(2 / count) of the two deviations.
    error = (found - expected).abs() / (spread.outer(spread) * (2 / count) ** 0.5)
    assert error.max() < 5
    assert (draws.mean(0).abs() / spread * count**0.5).max() < 5


def test_a_draw_by_hand() -> None:
    posterior = bayesify.convert(nn.Linear(2, 2), SWAG(rank=3, noise=2.0)).posterior
    walk(posterior, 5)
    noise = {name: torch.randn(1, *shape) for name, shape in posterior.shapes().items()}
    drawn = posterior(torch.zeros(1, dtype=torch.long), noise)
    assert set(noise) == {"weight", "bias", COEFFICIENTS}
    for name, value in drawn.items():
        alone = (posterior.variance[name] / 2).sqrt() * noise[name][0]
        together = sum(noise[COEFFICIENTS][0, k] * posterior.deviations[name][k] for k in range(3))
        expected = posterior.mean[name] + 2 * (alone + together / (2 * 2) ** 0.5)
        torch.testing.assert_close(value[0], expected)


@pytest.mark.parametrize(
    ("steps", "collect_from", "snapshots", "expected"),
    [
        (10, 0.5, 5, [6, 7, 8, 9, 10]),
        (10, 0.5, 100, [6, 7, 8, 9, 10]),
        (20, 0.5, 5, [12, 14, 16, 18, 20]),
        (12, 0.0, 3, [4, 8, 12]),
        (1, 0.9, 2, [1]),
    ],
)
def test_when_snapshots_are_taken(
    steps: int, collect_from: float, snapshots: int, expected: list[int]
) -> None:
    method = SWAG(collect_from=collect_from, snapshots=snapshots)
    posterior = bayesify.convert(nn.Linear(2, 2), method).posterior
    for _ in range(2):  # a second fit starts anew
        taken = []
        for step in range(1, steps + 1):
            before = posterior.mean["weight"].clone()
            with torch.no_grad():
                posterior.point.weights["weight"].add_(1)
            method.after_step(posterior, step, steps)
            if not torch.equal(before, posterior.mean["weight"]):
                taken.append(step)
        assert taken == expected
        assert posterior.counts["collected"] == len(expected)


# In a fit


def test_fit_improves_and_collects_its_path(
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    test_set: DataLoader,
    untouched: Callable[..., Any],
) -> None:
    method = recorded(lr=0.01, rank=4, snapshots=6)
    with untouched(trained):
        bnn = bayesify.convert(trained, method)
        before = bnn.evaluate(test_set).nll
        frozen = copy.deepcopy(bnn.network.state_dict())
        result = bnn.fit(loader, epochs=4, validation=validation, progress=False)
    assert result.nll < result.network_nll
    last = int(result.kept.removeprefix("step "))
    assert result.groups == 1
    # What is judged before anything is collected is the network.
    early = [nll for step, _, nll in result.history if step <= 12]
    assert early == [result.untrained_nll] * 2
    assert bnn.evaluate(test_set).nll < before
    assert same(frozen, bnn.network.state_dict())
    places = [flat(method.path[step]) for step in (14, 16, 18, 20, 22, 24) if step <= last]
    assert len(places) == bnn.posterior.counts["collected"] > 1
    mean, variance, _ = moments(places, 4)
    posterior = bnn.posterior
    torch.testing.assert_close(flat(dict(posterior.mean.items())).double(), mean)
    found = flat(dict(posterior.variance.items())).double()
    torch.testing.assert_close(found, variance, atol=1e-9, rtol=1e-3)


def test_training_runs_at_the_weights_themselves(trained: nn.Module, loader: DataLoader) -> None:
    """Three steps of fit are three steps of SGD on a copy of the network."""
    batches = list(loader)[:3]
    method = recorded(lr=0.01, collect_from=0.0)
    bnn = bayesify.convert(trained, method)
    bnn.fit(batches, validation=batches, progress=False, validations=3)
    network = copy.deepcopy(trained)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        for name, value in network.named_parameters():
            torch.testing.assert_close(method.path[step][name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stop", [4, 9])
def test_resumed_gives_the_same_result(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path, stop: int
) -> None:
    class Dies:
        """The batches of a loader, until something happens."""

        dataset = loader.dataset

        def __init__(self, after: int) -> None:
            self.left = after

        def __len__(self) -> int:
            return len(loader)

        def __iter__(self) -> Iterator[Any]:
            for batch in loader:
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
                yield batch

    def run(batches: Any, file: Path) -> tuple[Any, dict[str, Tensor]]:
        bnn = bayesify.convert(trained, SWAG(lr=0.01, rank=3))
        result = bnn.fit(
            batches,
            epochs=2,
            validation=validation,
            checkpoint=file,
            checkpoint_seconds=0,
            progress=False,
        )
        result.seconds = 0
        return result, bnn.state_dict()

    straight, expected = run(Dies(-1), tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(Dies(stop), tmp_path / "parts")
    resumed, found = run(Dies(-1), tmp_path / "parts")
    assert straight == resumed
    assert expected["posterior.counts.collected"] == 6
    assert same(expected, found)


def test_save_and_load(
    cnn: nn.Module, images: Tensor, tmp_path: Path, untouched: Callable[..., Any]
) -> None:
    with untouched(cnn):
        bnn = bayesify.convert(cnn, SWAG(rank=3, draws=4))
        walk(bnn.posterior, 7)
        bnn.save(tmp_path / "bnn")
        loaded = bayesify.load(tmp_path / "bnn", cnn)
    assert loaded.method == bnn.method
    assert loaded.posterior.counts["collected"] == 7
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)
    assert torch.equal(copy.deepcopy(bnn).predict(images).probs, bnn.predict(images).probs)


# Noise


def test_before_anything_is_collected_draws_are_the_network(
    cnn: nn.Module, images: Tensor, untouched: Callable[..., Any]
) -> None:
    with untouched(cnn):
        bnn = bayesify.convert(cnn, SWAG())
        assert torch.equal(bnn.sample(seed=3, index=5)(images), cnn(images))
        bnn.noise = 0.0
        assert torch.equal(bnn.sample()(images), cnn(images))


def test_noise_scales_the_distance_from_the_mean(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, SWAG(rank=3))
    walk(bnn.posterior, 5)
    mean = dict(bnn.posterior.mean.items())
    one = bnn.posterior.draws(0, range(2))
    bnn.noise = 2.0
    two = bnn.posterior.draws(0, range(2))
    bnn.noise = 0.0
    none = bnn.posterior.draws(0, range(2))
    for name, value in mean.items():
        torch.testing.assert_close(two[name] - value, 2 * (one[name] - value), atol=1e-6, rtol=1e-3)
        assert torch.equal(none[name][1], value)
    average = copy.deepcopy(cnn)
    average.load_state_dict(mean, strict=False)
    assert torch.equal(bnn.sample()(images), average(images))


# Settings


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rank": 1}, "rank=1 must be 2 or more"),
        ({"rank": 2.5}, "rank=2.5 must be a whole number"),
        ({"snapshots": 0}, "snapshots=0"),
        ({"collect_from": 1.0}, "collect_from=1.0 must be less than 1"),
        ({"collect_from": -0.1}, "collect_from=-0.1"),
        ({"lr": float("nan")}, "lr=nan"),
    ],
)
def test_bad_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        SWAG(**settings)


def test_settings_go_through_json() -> None:
    method = SWAG(rank=4, collect_from=0.25)
    assert make_method("swag", json.loads(json.dumps(method.to_dict()))) == method


def test_plan(cnn: nn.Module) -> None:
    planned = bayesify.plan(cnn, SWAG(rank=7))
    weights = sum(parameter.numel() for parameter in cnn.parameters())
    assert planned.trainable == weights
    assert planned.random_numbers == weights + 7
