"""The trunk: what stands before all that trains runs once, without gradients, or not apart."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, BayesianModel, Method, trunk
from bayesify.batches import Inputs, as_inputs
from bayesify.gradients import Gradients
from conftest import Counting, small_resnet

aten = torch.ops.aten
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*performance drop"),
    pytest.mark.filterwarnings("ignore:.*cannot be vectorised"),
]
METHODS = {
    "abnn": ABNN(members=3, draws=3, noise=0.3),
    "bayes-adapter": BayesAdapter(draws=2, log_std=(-3.0, -3.0), adapt_statistics=False),
    "ibnn": IBNN(components=2, draws=2, adapt_statistics=False),
}


def step(gradients: Gradients, x: Any) -> tuple[Tensor, Counter[Any]]:
    """The gradients of a step, and the operations done for them."""
    inputs, model = as_inputs(x), gradients.model
    target = torch.arange(len(inputs)) % 3
    everything = slice(0, len(inputs))
    gradients.add(inputs, target, 7, everything)  # warm: what is tried once has been tried
    model.zero_grad()
    with Counting() as counted:
        gradients.add(inputs, target, 7, everything)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found
    model.zero_grad()
    return torch.cat([grad.flatten() for grad in found]), counted.calls


def gradients_of(
    network: nn.Module, method: Method, where: Any, groups: int | None = None
) -> Gradients:
    return Gradients(bayesify.convert(network, method, where=where), None, groups, None, 0)


def both(network: nn.Module, method: Method, where: Any, x: Any, groups: int | None = None) -> Any:
    """Gradients and operations, of the network itself and as trunk and rest."""
    halves = gradients_of(network, method, where, groups)
    found = step(halves, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trunk, "SHARE", 2.0)
        itself = step(gradients_of(network, method, where, groups), x)
    return halves, itself, found


@pytest.mark.parametrize("groups", [None, 4, 1])
def test_gradients_are_the_networks_and_members_share_the_trunk(groups: int | None) -> None:
    x = torch.randn(8, 3, 16, 16)
    halves, (expected, many), (found, few) = both(
        small_resnet(), METHODS["abnn"], "layer3.*", x, groups
    )
    assert halves.split(as_inputs(x)) is not None
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    # Behind the trunk, which ends with the convolutions before the first norms, there is one.
    draws = 3 * (groups or 1)
    assert few[aten.convolution.default] == 8 + draws
    assert many[aten.convolution.default] == 9 * draws


@pytest.mark.parametrize("method", ["abnn", "bayes-adapter"])
@pytest.mark.parametrize("groups", [None, 4, 1])
def test_nothing_goes_backward_through_the_trunk(method: str, groups: int | None) -> None:
    """With the network itself and behind its trunk: gradients only where they are needed."""
    x = torch.randn(8, 3, 16, 16)
    chosen = METHODS[method]
    _, (_, itself), (_, halves) = both(small_resnet(), chosen, "layer3.*", x, groups)
    _, (_, everywhere), _ = both(small_resnet(), chosen, 1.0, x, groups)
    runs = chosen.rounds() * (groups or 1)
    # ABNN: the gradient passes one convolution on its way back to the first random norms, and
    # BayesAdapter trains the weights of three.
    needed = {"abnn": 1, "bayes-adapter": 3}[method] * runs
    assert itself[aten.convolution_backward.default] == needed
    assert halves[aten.convolution_backward.default] == needed
    assert everywhere[aten.convolution_backward.default] > 2 * needed


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, groups: int | None) -> None:
    where = "layer3.*" if method == "abnn" else ["layer3.*", "fc.*"]
    gradients = gradients_of(small_resnet(), METHODS[method], where, groups)
    inputs = as_inputs(torch.randn(8, 3, 16, 16))
    found = gradients.split(inputs)
    assert found is not None
    runner, draws = gradients.runner, gradients.model.posterior.draws(0, range(8))
    features = found.features(inputs)
    one = {name: value[3] for name, value in draws.items()}
    torch.testing.assert_close(found.rest.plain(one, features), runner.plain(one, inputs))
    apart = [i.map(lambda t: t.unsqueeze(1)) for i in (features, inputs)]
    torch.testing.assert_close(found.rest.paired(draws, apart[0]), runner.paired(draws, apart[1]))


def test_arguments_by_keyword() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(3, 8), nn.LayerNorm(8)

        def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
            return self.norm(self.a(left).relu() + self.b(right).tanh())

    x = {"left": torch.randn(6, 4), "right": torch.randn(6, 3)}
    halves, (expected, _), (found, _) = both(Two().eval(), METHODS["abnn"], None, x)
    assert halves.split(as_inputs(x)) is not None
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_torchs_own_attention_is_split() -> None:
    """Its fast path in evaluation has no gradients, and must not be taped."""
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4, enable_nested_tensor=False
    )
    network = nn.Sequential(layers, nn.Flatten(), nn.Linear(40, 3)).eval()
    x = torch.randn(6, 5, 8)
    fast = torch.backends.mha.get_fastpath_enabled()
    halves, (expected, _), (found, _) = both(network, METHODS["abnn"], "0.layers.3.*", x, 2)
    assert halves.split(as_inputs(x)) is not None
    assert torch.backends.mha.get_fastpath_enabled() == fast
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


class Tail(nn.Module):
    """A trunk that is to be replaced, and one random norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def middle(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(x)))


class LeavesTorch(Tail):
    def middle(self, x: Tensor) -> Tensor:
        return self.layers(x) + torch.from_numpy(np.sin(3 * x.detach().numpy()))


class MixesExamples(Tail):
    def middle(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x - x.mean(0)


class LooksAtValues(Tail):
    def middle(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.sum() > 1e9 else self.layers(-x)


class IsRandom(Tail):
    def middle(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * torch.randn_like(x))


class WritesTooLate(Tail):
    """The trunk's result changes after a random layer has read it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(x)
        y = self.norm(x)
        x.mul_(2)
        return self.head(y + x)


class OtherByBatch(Tail):
    def middle(self, x: Tensor) -> Tensor:
        return self.layers(x) if len(x) == 1 else -self.layers(x)


@pytest.mark.parametrize(
    "network",
    [LeavesTorch, MixesExamples, LooksAtValues, IsRandom, WritesTooLate, OtherByBatch],
)
def test_what_cannot_be_split_is_not(network: type[Tail]) -> None:
    x = as_inputs(torch.randn(8, 8))
    assert gradients_of(Tail().eval(), METHODS["abnn"], None, 2).split(x) is not None
    assert gradients_of(network().eval(), METHODS["abnn"], None, 2).split(x) is None


def test_gradients_are_compared_not_only_outputs() -> None:
    class Stopped(Tail):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.middle(x))
            return self.head(y - y.detach() + y.clone())

    gradients = gradients_of(Tail().eval(), METHODS["abnn"], None)
    inputs = as_inputs(torch.randn(8, 8))
    found = gradients.split(inputs)
    draws = gradients.model.posterior.draws(0, range(2))
    assert found is not None
    assert found.agrees(gradients.runner, draws, inputs, paired=True)
    other = Stopped().eval()
    other.load_state_dict(gradients.model.network.state_dict())
    twice = gradients_of(other, METHODS["abnn"], None)
    one = {name: value[0] for name, value in draws.items()}
    torch.testing.assert_close(twice.runner.plain(one, inputs), gradients.runner.plain(one, inputs))
    assert not found.agrees(twice.runner, draws, inputs, paired=False)


def test_a_short_trunk_is_not_split_off() -> None:
    gradients = gradients_of(small_resnet(), METHODS["abnn"], 1.0)
    assert gradients.split(as_inputs(torch.randn(4, 3, 16, 16))) is None


def test_other_shapes_have_their_own_split() -> None:
    gradients = gradients_of(small_resnet(), METHODS["abnn"], "layer3.*")
    for side in (8, 16):
        inputs = as_inputs(torch.randn(4, 3, side, side))
        found = gradients.split(inputs)
        assert found is not None
        assert found is gradients.split(inputs)
        draw = {n: v[0] for n, v in gradients.model.posterior.draws(0, [0]).items()}
        torch.testing.assert_close(
            found.rest.plain(draw, found.features(inputs)), gradients.runner.plain(draw, inputs)
        )


def test_arguments_without_rows_are_the_networks_own_affair() -> None:
    class Scaled(Tail):
        def forward(self, x: Tensor, scale: Any) -> Tensor:
            return super().forward(x * scale)

    gradients = gradients_of(Scaled().eval(), METHODS["abnn"], None)
    for scale in (2.0, torch.tensor(2.0), torch.ones(1, 8)):
        assert gradients.split(Inputs((torch.randn(4, 8), scale), {})) is None


def test_the_likelihoods_noise_level_still_trains() -> None:
    bnn: BayesianModel = bayesify.convert(
        nn.Sequential(Tail(), nn.Linear(3, 1)).eval(), METHODS["abnn"], likelihood="regression"
    )
    gradients = Gradients(bnn, None, None, None, 0)
    x, y = as_inputs(torch.randn(8, 8)), torch.randn(8)
    assert gradients.split(x) is not None
    gradients.add(x, y, 7, slice(0, 8))
    assert all(parameter.grad is not None for parameter in bnn.parameters())
