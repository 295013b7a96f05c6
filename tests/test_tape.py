import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, BayesianModel, BayesifyWarning, sampling
from bayesify.batches import as_inputs
from bayesify.memory import PeakMemory
from bayesify.sampling import MOST_SHAPES, TAPED
from bayesify.tape import Tape, kernels, playing
from conftest import Counting, needs_compiler

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
CONVOLUTIONS = [
    aten.convolution.default,
    mkldnn._convolution_pointwise.default,
    mkldnn._convolution_pointwise_.binary,
]


class Residual(nn.Module):
    """What residual networks do, in and out of place."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace)
        )
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.norm2 = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace)
        self.head = nn.Linear(8 * 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        if self.inplace:
            y += x
        else:
            y = y + x
        return self.head(self.pool(self.act(y)).view(len(x), -1))


class Attending(nn.Module):
    """A transformer block, its first token read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm2(x))
        return {"logits": self.head(self.norm3(x)[:, 0])}


def shaken(network: nn.Module) -> nn.Module:
    """A network whose norms do something."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    return network.eval()


def tape_of(bnn: BayesianModel, x: Any) -> object:
    with torch.no_grad():
        return bnn.runner._tape(bnn.posterior.draws(0, range(4)), as_inputs(x))


def agree(bnn: BayesianModel, x: Any) -> None:
    assert tape_of(bnn, x) is not None
    bnn.strategy = "looped"
    looped = bnn.predict(x, keep_draws=True).draws
    for bnn.strategy in TAPED:
        torch.testing.assert_close(
            bnn.predict(x, keep_draws=True).draws, looped, atol=1e-5, rtol=1e-5
        )


METHODS = [
    ABNN(members=2, draws=6, noise=0.3),
    BayesAdapter(draws=4, log_std=(-4.0, -3.0)),
    IBNN(components=2, draws=4, mean_std=0.2),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("inplace", [False, True])
def test_residual(method: bayesify.Method, inplace: bool) -> None:
    network = shaken(Residual(inplace=inplace))
    x = torch.randn(3, 3, 8, 8)
    before, weights = x.clone(), copy.deepcopy(network.state_dict())
    agree(bayesify.convert(network, method), x)
    assert torch.equal(x, before)
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_attention(method: bayesify.Method) -> None:
    x = torch.randn(3, 5, 8)
    agree(bayesify.convert(shaken(Attending()), method), x)
    mask = torch.rand(3, 1, 5, 5) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)
    agree(bayesify.convert(shaken(Attending()), method), {"x": x, "mask": mask})


@pytest.mark.parametrize("where", ["norm1.*", "norm2.*", ["stem.1.*", "norm2.*"]])
def test_some_layers(where: Any) -> None:
    agree(
        bayesify.convert(shaken(Residual()), ABNN(noise=0.3), where=where), torch.randn(2, 3, 8, 8)
    )


def test_what_draws_share_runs_once_and_norms_are_folded() -> None:
    bnn = bayesify.convert(shaken(Residual()), ABNN(members=1, draws=5), where="norm1.*")
    bnn.strategy = "folded"
    x = torch.randn(2, 3, 8, 8)
    bnn.predict(x)
    with Counting() as counted:
        bnn.predict(x)
    # Stem and first convolution once, the second for each draw, the first norm behind the first
    # convolution for each draw, the others nowhere.
    assert sum(counted.calls[each] for each in CONVOLUTIONS) == 2 + 5
    assert counted.calls[aten.native_batch_norm.default] == 5


@pytest.mark.parametrize("inplace", [False, True])
def test_convolutions_add_and_clip(inplace: bool) -> None:
    bnn = bayesify.convert(shaken(Residual(inplace=inplace)), ABNN(members=1, draws=5), where="*")
    bnn.strategy = "folded"
    x = torch.randn(2, 3, 8, 8)
    bnn.predict(x)
    with Counting() as counted:
        bnn.predict(x)
    assert counted.calls[mkldnn._convolution_pointwise.default] == 5
    assert counted.calls[mkldnn._convolution_pointwise_.binary] == 5
    # All draws share the stem's convolution, but not its norm.
    assert counted.calls[aten.relu.default] + counted.calls[aten.relu_.default] == 5


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.Tanh])
@pytest.mark.parametrize("adds", [False, True])
def test_activations(act: type[nn.Module], adds: bool) -> None:
    network = Residual()
    network.act = act()
    if not adds:
        network.norm2 = nn.Sequential(network.norm2, act())
    agree(bayesify.convert(shaken(network), ABNN(noise=0.3), where="*"), torch.randn(2, 3, 8, 8))


class Unusual(nn.Module):
    """What stands behind its convolutions must not be done by them, or not at once."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = [self.norms[0](self.convs[0](x))]  # read again after its activation
        y.append(self.norms[1](self.convs[1](functional.silu(y[0]))))
        y.append(self.norms[2](self.convs[2](y[1] + y[0])))
        before = self.norms[3](self.convs[3](y[2]))
        functional.relu_(y[2])  # the convolution has read it by now
        y.append(functional.hardswish(before + y[2]))
        y.append(self.norms[4](self.convs[4](y[3])) + y[3].mean((2, 3), keepdim=True))
        last = self.norms[5](self.convs[5](y[4]))
        y[4] += last  # into the other
        return self.head((torch.add(y[4], last, alpha=2.0) + y[3]).mean((2, 3)))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_what_stands_behind_a_convolution_in_unusual_ways(method: bayesify.Method) -> None:
    network = shaken(Unusual())
    agree(bayesify.convert(network, method), torch.randn(3, 3, 8, 8))
    # One small image has fewer numbers than a layer has weights.
    agree(bayesify.convert(network, method), torch.randn(1, 3, 4, 4))


def test_weights_that_outweigh_their_inputs_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "KEPT", 0)  # as if the network were large
    network, x = shaken(Unusual()), torch.randn(1, 3, 2, 2)
    assert network.convs[0].weight.numel() > kernels.MUCH * 8 * 2 * 2
    agree(bayesify.convert(network, ABNN(noise=0.3), where="norms.4.*"), x)


@pytest.mark.parametrize("how", ["not in this torch", "switched off", "no memory to spare"])
def test_without_kernels_of_onednn(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "not in this torch":
        monkeypatch.setattr(kernels, "FUSES", False)
    elif how == "no memory to spare":
        monkeypatch.setattr(sampling, "MEMORY_BUDGET", 1)
    on = how != "switched off"
    with torch.backends.mkldnn.flags(enabled=on, allow_tf32=None), Counting() as counted:
        agree(bayesify.convert(shaken(Residual()), METHODS[0]), torch.randn(1, 3, 8, 8))
        agree(bayesify.convert(shaken(Attending()), METHODS[0]), torch.randn(16, 5, 8))
    if how == "no memory to spare":
        assert counted.calls[mkldnn._linear_pointwise.default] > 0
        assert counted.calls[mkldnn._reorder_linear_weight.default] == 0
    else:
        assert not any("mkldnn::" in str(called.name()) for called in counted.calls)


def test_memory_of_packed_weights_is_measured() -> None:
    bnn = bayesify.convert(shaken(Attending()), ABNN(members=1, draws=4), where="*")
    x = torch.randn(64, 5, 8)
    bnn.strategy = "folded"
    bnn.predict(x)
    packed = sum(layer.weight.nbytes for layer in (bnn.network.qkv, bnn.network.out))
    with PeakMemory() as memory:
        bnn.predict(x)
    with PeakMemory() as without:
        bnn.predict(x, batch_size=64, memory_budget=1)
    assert memory.peak >= without.peak + packed // 2


class Shapes(TorchDispatchMode):
    """Notes the shapes of operations' first operands."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            self.of.setdefault(func.overloadpacket.__name__, []).append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_nobody_reads_are_not_computed(masked: bool) -> None:
    bnn = bayesify.convert(shaken(Attending()), ABNN(members=1, draws=4), where="*")
    bnn.strategy = "folded"
    x = {"x": torch.randn(64, 5, 8)}
    if masked:
        x["mask"] = torch.ones(64, 1, 5, 5, dtype=torch.bool)
    bnn.predict(x)
    with Shapes() as shapes:
        bnn.predict(x)
    assert shapes.of["_linear_pointwise"].count((64, 16)) == 4
    assert (64, 5, 16) not in shapes.of["_linear_pointwise"]
    queries = shapes.of["_scaled_dot_product_flash_attention_for_cpu"]
    assert queries == [(64, 2, 5 if masked else 1, 4)] * 4


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_a_network_that_looks_at_values_is_not_taped() -> None:
    class Branching(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 1e9 else y + 1

    x = torch.randn(2, 3, 8, 8)
    bnn = bayesify.convert(shaken(Branching()))
    assert tape_of(bnn, x) is None
    folded = bnn.predict(x)
    bnn.strategy = "looped"
    torch.testing.assert_close(folded.probs, bnn.predict(x).probs)


def test_a_network_that_leaves_torch_is_not_taped() -> None:
    class Outside(Residual):
        def forward(self, x: Tensor) -> Tensor:
            middle = torch.from_numpy(x.detach().numpy().mean((1, 2, 3)))
            return super().forward(x) * middle[:, None]

    assert tape_of(bayesify.convert(shaken(Outside())), torch.randn(2, 3, 8, 8)) is None


def test_a_network_that_is_random_itself_is_not_taped() -> None:
    class Noisy(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    assert tape_of(bayesify.convert(shaken(Noisy())), torch.randn(2, 3, 8, 8)) is None


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_what_draws_share_is_not_written_over() -> None:
    class Adding(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x += self.norm1(self.first(x))
            return self.head(self.pool(x).flatten(1))

    bnn = bayesify.convert(shaken(Adding()), ABNN(noise=0.3), where="norm1.*")
    x = torch.randn(2, 3, 8, 8)
    assert tape_of(bnn, x) is None
    taped = bnn.predict(x).probs
    bnn.strategy = "looped"
    torch.testing.assert_close(taped, bnn.predict(x).probs)


def test_a_tape_follows_what_trains() -> None:
    bnn = bayesify.convert(shaken(Residual()), IBNN(components=2, draws=4))
    x = torch.randn(2, 3, 8, 8)
    bnn.strategy = "folded"
    before = bnn.predict(x).probs
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.mul_(1.1)
    after = bnn.predict(x).probs
    assert not torch.allclose(before, after, atol=1e-4)
    bnn.strategy = "looped"
    torch.testing.assert_close(bnn.predict(x).probs, after, atol=1e-5, rtol=1e-5)


def test_taping_takes_no_more_memory_than_running() -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(12):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 256, 3)).eval()
    bnn = bayesify.convert(network, ABNN(draws=6))
    inputs = as_inputs(torch.randn(4, 3, 16, 16))
    draws = bnn.posterior.draws(0, range(6))
    with torch.no_grad():
        with PeakMemory() as plain:
            network(*inputs.args)
        with PeakMemory() as taping:
            bnn.runner._record(draws, inputs)
    assert taping.peak < 2 * plain.peak


@pytest.mark.parametrize(("examples", "tried"), [(8, True), (9, False)])
def test_draws_that_are_too_large_are_not_tried_together(
    monkeypatch: pytest.MonkeyPatch, examples: int, tried: bool
) -> None:
    """Two of them would take twice the memory, where one keeps the processor busy."""
    monkeypatch.setattr(sampling, "CACHE", 1)
    monkeypatch.setattr(sampling, "FASTEST", {})
    bnn = bayesify.convert(shaken(Residual()), ABNN(draws=6))
    x = torch.randn(examples, 3, 8, 8)
    bnn.predict(x, batch_size=examples)
    tape = tape_of(bnn, x)
    assert isinstance(tape, Tape)
    assert (tape.stacks is not None) == tried
    if not tried:
        assert bnn.runner.used == {"folded"}


@needs_compiler
@pytest.mark.parametrize(
    ("network", "shape"), [(Residual(inplace=True), (3, 3, 8, 8)), (Attending(), (3, 5, 8))]
)
def test_compiled(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Other weights are no reason to compile again."""
    bnn = bayesify.convert(shaken(network), ABNN(members=2, draws=6, noise=0.3), where=2)
    x = torch.randn(shape)
    bnn.strategy = "looped"
    looped = bnn.predict(x, keep_draws=True).draws
    bnn.strategy = "compiled"
    torch.testing.assert_close(bnn.predict(x, keep_draws=True).draws, looped, atol=1e-5, rtol=1e-5)
    assert "compiled" in bnn.runner.used
    program = tape_of(bnn, x)._program
    assert program is not None
    bnn.noise, bnn.strategy = 0.1, "looped"
    weaker = bnn.predict(x, seed=1, keep_draws=True).draws
    bnn.strategy = "compiled"
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = bnn.predict(x, seed=1, keep_draws=True).draws
    torch.testing.assert_close(again, weaker, atol=1e-5, rtol=1e-5)
    assert tape_of(bnn, x)._program is program


def test_what_cannot_be_compiled_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", fails)
    bnn = bayesify.convert(shaken(Residual()), ABNN(draws=6))
    x = torch.randn(3, 3, 8, 8)
    bnn.strategy = "folded"
    folded = bnn.predict(x).probs
    bnn.strategy = "compiled"
    with pytest.warns(BayesifyWarning, match=r"cannot be compiled \(no compiler\)"):
        first = bnn.predict(x).probs
    assert torch.equal(first, folded)
    assert torch.equal(bnn.predict(x).probs, folded)
    assert bnn.runner.used == {"folded"}


def test_compiled_code_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: lambda *tensors: 2 * run(*tensors))
    bnn = bayesify.convert(shaken(Residual()), ABNN(draws=6))
    bnn.strategy = "compiled"
    with pytest.warns(BayesifyWarning, match="its results are others"):
        bnn.predict(torch.randn(3, 3, 8, 8))
    assert bnn.runner.used == {"folded"}


@pytest.mark.parametrize("strategy", [*TAPED, "compiled"])
@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_gradients_do_not_go_through_a_tape(strategy: str) -> None:
    bnn = bayesify.convert(shaken(Residual(inplace=True)), ABNN(draws=6))
    bnn.strategy = strategy
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    bnn(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_a_network_that_needs_gradients_of_its_own() -> None:
    class Sloping(Residual):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.stem(x).sum(), x)
            return super().forward(x.detach() + 0.1 * slope)

    bnn = bayesify.convert(shaken(Sloping()), ABNN(draws=6))
    x = torch.randn(2, 3, 8, 8)
    auto = bnn.predict(x).probs
    bnn.strategy = "looped"
    torch.testing.assert_close(auto, bnn.predict(x).probs)


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_predictions_can_be_used_in_training_afterwards() -> None:
    bnn = bayesify.convert(shaken(Attending()), ABNN(draws=6))
    x = torch.randn(2, 5, 8)
    bnn.predict(x)
    bnn(x).sum().backward()
    assert all(parameter.grad is not None for parameter in bnn.parameters())


def test_other_shapes_have_their_own_tape() -> None:
    bnn = bayesify.convert(shaken(Attending()), ABNN(noise=0.3))
    for shape in ((2, 5, 8), (3, 5, 8), (3, 7, 8), (1, 1, 8)):
        agree(bnn, torch.randn(shape))


def test_double() -> None:
    agree(bayesify.convert(shaken(Residual().double())), torch.randn(2, 3, 8, 8).double())


def test_auto_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = bayesify.convert(shaken(Residual()))
    x = torch.randn(7, 3, 8, 8)
    found = []
    fastest = type(bnn.runner)._fastest
    monkeypatch.setattr(
        type(bnn.runner), "_fastest", lambda *args: found.append(fastest(*args)) or found[-1]
    )
    first = bnn.predict(x)
    assert torch.equal(bnn.predict(x).probs, first.probs)
    again = bayesify.convert(shaken(Residual()))
    again.predict(x)
    assert len(found) == 1
    assert found[0] in TAPED


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_texts_of_all_lengths_are_not_all_taped(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = bayesify.convert(shaken(Attending()), ABNN(draws=6))
    taped = []
    record = type(bnn.runner)._record
    monkeypatch.setattr(type(bnn.runner), "_record", lambda *args: taped.append(1) or record(*args))
    for length in range(30, 30 + 2 * MOST_SHAPES):
        x = torch.randn(2, length, 8)
        bnn.strategy = "auto"
        auto = bnn.predict(x).probs
        bnn.strategy = "looped"
        torch.testing.assert_close(auto, bnn.predict(x).probs, atol=1e-5, rtol=1e-5)
    assert len(taped) == MOST_SHAPES


def test_a_network_that_refuses_other_inputs_is_run_as_it_is() -> None:
    class Particular(Residual):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 2 and float(x.detach().numpy().max()) != 1.0:
                raise ValueError("images must reach 1")
            return super().forward(x)

    bnn = bayesify.convert(shaken(Particular()), ABNN(draws=6))
    bnn.strategy = "folded"
    assert len(bnn.predict(torch.rand(2, 3, 8, 8).clamp_min(1.0))) == 2


def test_a_trunk_is_folded_once_unless_its_statistics_may_change() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    network = Residual().eval()
    for method in (ABNN(members=1, draws=4), BayesAdapter(draws=4)):
        bnn = bayesify.convert(network, method, where="norm2.*")
        bnn.strategy = "folded"
        before = bnn.predict(x).probs
        for _, statistic in bnn.posterior.statistics.items():
            statistic.data.add_(0.3)  # as a layer in training does, which nothing counts
        after = bnn.predict(x).probs
        bnn.strategy = "looped"
        torch.testing.assert_close(after, bnn.predict(x).probs)
        assert torch.equal(after, before) == (type(method) is ABNN)
        (tape,) = bnn.runner._tapes.values()
        assert tape is not None
        assert bool(tape._kept) == (type(method) is ABNN)
