import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import ABNN, BayesifyWarning, DataError, UnsupportedNetworkError, WrongNetworkError
from bayesify.batches import as_inputs
from bayesify.memory import PeakMemory
from bayesify.replicas import private_copy
from bayesify.sampling import STRATEGIES, Runner
from conftest import needs_compiler, small_cnn

EAGER = [strategy for strategy in STRATEGIES if strategy != "compiled"]


def test_private_copy_shares_weights_and_nothing_else(cnn: nn.Module) -> None:
    cnn.train()
    copy = private_copy(cnn)
    for (name, mine), theirs in zip(copy.named_parameters(), cnn.parameters(), strict=True):
        assert mine is not theirs, name
        assert mine.data_ptr() == theirs.data_ptr(), name
        assert not mine.requires_grad
    for mine, theirs in zip(copy.buffers(), cnn.buffers(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
    assert not copy.training
    assert cnn.training


def test_private_copy_keeps_ties_and_attributes() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.table = [torch.arange(3.0), {"x": torch.ones(2)}]

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.table[0]

    network = Tied()
    copy = private_copy(network)
    assert copy.a.weight is copy.b.weight
    assert copy.table[0] is not network.table[0]
    x = torch.randn(2, 3)
    assert torch.equal(copy(x), network(x))


def test_old_weight_norm_can_be_copied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        network = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.LayerNorm(3))
    x = torch.randn(2, 3)
    network(x)
    assert torch.equal(private_copy(network)(x), network(x))


def test_what_cannot_be_copied() -> None:
    network = nn.Sequential(nn.LayerNorm(3))
    network.lock = threading.Lock()
    with pytest.raises(UnsupportedNetworkError, match="cannot be copied"):
        bayesify.convert(network)


def test_script_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.LayerNorm(3)))
    with pytest.raises(UnsupportedNetworkError, match="ScriptModule"):
        private_copy(scripted)


def test_a_network_that_counts_its_calls_counts_its_own_only(images: Tensor) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_cnn()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.body(x)

    network = Counting()
    bayesify.convert(network).predict(images, draws=3)
    assert network.calls == 0


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_strategies_and_batch_sizes_agree(cnn: nn.Module, images: Tensor, batch: int) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.3, draws=6))
    whole = bnn.predict(images, keep_draws=True)
    for strategy in EAGER:
        bnn.strategy = strategy
        parts = bnn.predict(images, keep_draws=True, batch_size=batch)
        torch.testing.assert_close(parts.draws, whole.draws, atol=1e-5, rtol=1e-5)
        assert torch.equal(parts.probs, bnn.predict(images, batch_size=batch).probs)


def test_a_prediction_does_not_depend_on_its_neighbours(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.3))
    order = torch.randperm(len(images))
    torch.testing.assert_close(bnn.predict(images[order]).probs, bnn.predict(images).probs[order])


def test_budget_makes_chunks_that_do_not_change_the_answer(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.3))
    bnn.strategy = "vectorised"
    drawn = bnn.posterior.draws(0, range(24))
    inputs = as_inputs(images)
    needed = bnn.runner.bytes_per_example(drawn, inputs) * len(images)
    assert bnn.runner.way(drawn, inputs, 1 << 30).chunk == 24
    assert bnn.runner.way(drawn, inputs, 5 * needed).chunk == 5
    assert bnn.runner.way(drawn, inputs, 1).chunk == 1
    assert bnn.runner.batch_size(drawn, inputs, memory_budget=1) == 1
    with torch.no_grad():
        chunks = list(bnn.runner.outputs(drawn, inputs, memory_budget=5 * needed))
    assert sum(len(chunk) for chunk in chunks) == 24
    tight = bnn.predict(images, memory_budget=1)
    torch.testing.assert_close(tight.probs, bnn.predict(images).probs)


def test_peak_memory_counts_what_is_alive_at_one_time() -> None:
    with PeakMemory() as memory:
        for _ in range(3):
            x = torch.ones(1000)
            y = x + 1
            del x
            z = y.view(10, 100)
            del y, z
    assert memory.peak == 2 * 4000


def test_a_loop_is_taken_where_vmap_cannot_go_and_said_once(images: Tensor) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_cnn()

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return y if y.sum() > 1e9 else y + 1

    bnn = bayesify.convert(Branching(), ABNN(noise=0.3))
    bnn.strategy = "vectorised"
    with pytest.warns(BayesifyWarning, match="one after another") as said:
        first = bnn.predict(images)
    again = bnn.predict(images)
    bnn.predict(torch.randn(2, 1, 9, 9))
    assert len(said) == 1
    assert torch.equal(first.probs, again.probs)


def test_vmap_is_tried_once(
    cnn: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn = bayesify.convert(cnn)
    bnn.strategy = "vectorised"
    tries = []
    find = Runner._vmap_failure
    monkeypatch.setattr(
        Runner, "_vmap_failure", lambda *args, **more: tries.append(1) or find(*args, **more)
    )
    for _ in range(3):
        bnn.predict(images)
    assert len(tries) == 1


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_wrong_shape(cnn: nn.Module, strategy: str) -> None:
    bnn = bayesify.convert(cnn)
    bnn.strategy = strategy
    with pytest.raises(DataError, match=r"cannot run on inputs \(float32 \[1, 3, 8, 8\]\)"):
        bnn.predict(torch.randn(5, 3, 8, 8))


@pytest.mark.parametrize("strategy", [*EAGER, pytest.param("compiled", marks=needs_compiler)])
def test_eight_threads_while_the_owner_uses_the_original(
    cnn: nn.Module, images: Tensor, strategy: str
) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.3))
    bnn.strategy = strategy
    with torch.no_grad():
        plain = cnn(images)
    expected = [bnn.predict(images, seed=seed).probs for seed in range(8)]
    wrong: list[str] = []
    stop = threading.Event()

    def own() -> None:
        with torch.no_grad():
            while not stop.is_set():
                if not torch.equal(cnn(images), plain):
                    wrong.append("the original")

    def hammer(seed: int) -> None:
        for _ in range(6):
            if not torch.equal(bnn.predict(images, seed=seed).probs, expected[seed]):
                wrong.append(f"seed {seed}")

    owner = threading.Thread(target=own)
    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in (owner, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    owner.join()
    assert not wrong


def test_changed_weights_are_noticed(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn)
    bnn.predict(images)
    with torch.no_grad():
        cnn[0].weight.add_(0.1)
    for use in (bnn.predict, bnn.evaluate, lambda _: bnn.sample()):
        with pytest.raises(WrongNetworkError, match="changed in place"):
            use([(images, torch.zeros(12))] if use == bnn.evaluate else images)


def test_paired_runs_each_draw_on_its_own_group(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.3))
    runner: Runner = bnn.runner
    with torch.no_grad():
        draws = bnn.posterior.draws(0, range(12))
        paired = runner.paired(draws, as_inputs(images.unsqueeze(1)))
        for g in range(12):
            draw = {name: value[g] for name, value in draws.items()}
            torch.testing.assert_close(
                paired[g], runner.plain(draw, as_inputs(images[g : g + 1])), atol=1e-5, rtol=1e-5
            )
