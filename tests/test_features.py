"""Features: a fit from the trunk's outputs, kept in a file, is the fit from the inputs."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import bayesify
from bayesify import ABNN, BayesAdapter, Method, SettingError, trunk
from bayesify.features import Store
from bayesify.fit_result import FitResult
from bayesify.gradients import Gradients
from bayesify.trunk import Split
from conftest import small_resnet

pytestmark = [
    pytest.mark.filterwarnings("ignore:training did not help"),
    pytest.mark.filterwarnings("ignore:.*performance drop"),
]


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def transformer() -> nn.Module:
    torch.manual_seed(3)
    return Transformer().eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "resnet": (small_resnet, (3, 8, 8), ("layer3.", "fc.")),
    "transformer": (transformer, (6, 4), ("blocks.3.", "norm.", "head.")),
}
METHODS: dict[str, Method] = {
    "abnn": ABNN(members=2, draws=4, lr=0.01),
    "bayes-adapter": BayesAdapter(
        draws=4, lr=0.01, log_std=(-3.0, -3.0), adapt_statistics=False, adam=False
    ),
}
EXAMPLES = 44


def late(name: str, method: Method) -> bayesify.BayesianModel:
    make, _, where = NETWORKS[name]
    network = make()
    return bayesify.convert(network, method, where=lambda site: site.startswith(where))


def examples(name: str, count: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, *NETWORKS[name][1], generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


def loader_of(name: str, **settings: Any) -> DataLoader[Any]:
    return DataLoader(examples(name), **{"batch_size": 8, "shuffle": True, **settings})


def fitted(
    name: str,
    method: Method,
    loader: object = None,
    **settings: Any,
) -> tuple[FitResult, dict[str, Tensor]]:
    bnn = late(name, method)
    loader = loader_of(name) if loader is None else loader
    held = DataLoader(examples(name, 20), 8)
    settings = {"epochs": 3, "keep": "last", "progress": False, "validation": held} | settings
    return bnn.fit(loader, **settings), bnn.posterior.tensors()


def assert_same(
    found: tuple[FitResult, dict[str, Tensor]], expected: tuple[FitResult, dict[str, Tensor]]
) -> None:
    (a, mine), (b, other) = found, expected
    assert (a.steps, a.kept, a.groups) == (b.steps, b.kept, b.groups)
    torch.testing.assert_close(torch.tensor(a.history), torch.tensor(b.history), atol=1e-5, rtol=0)
    assert abs(a.network_nll - b.network_nll) < 1e-5
    assert abs(a.untrained_nll - b.untrained_nll) < 1e-5
    for site, value in other.items():
        torch.testing.assert_close(mine[site], value, atol=1e-5, rtol=1e-5, msg=site)


@pytest.fixture
def trunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples each run of a trunk had."""
    sizes: list[int] = []
    features = Split.features

    def note(self: Split, inputs: Any) -> Any:
        sizes.append(len(inputs))
        return features(self, inputs)

    monkeypatch.setattr(Split, "features", note)
    return sizes


@pytest.mark.parametrize("settings", [{}, {"groups": 2}, {"groups": 1}, {"accumulate": 3}], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fit_from_features_is_the_fit(
    name: str, method: str, settings: dict[str, Any], trunks: list[int]
) -> None:
    whole = fitted(name, METHODS[method], cache=False, **settings)
    trunks.clear()
    found = fitted(name, METHODS[method], **settings)
    assert found[0].cache.endswith("MB of features"), found[0].cache
    assert whole[0].cache == "none: switched off"
    assert_same(found, whole)
    # Once to compare, once to see how large they are, then each example once.
    assert sum(trunks) == 8 + 32 + EXAMPLES + 20


def test_the_reference_is_the_network_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above, members share the trunk without a cache too; here nothing is split."""
    for name in NETWORKS:
        found = fitted(name, METHODS["abnn"])
        with monkeypatch.context() as patch:
            patch.setattr(trunk, "SHARE", 2.0)
            whole = fitted(name, METHODS["abnn"])
        assert "less than half of the network" in whole[0].cache
        assert_same(found, whole)


def test_held_out_examples_are_split_off_and_workers_read() -> None:
    loader = loader_of("resnet", num_workers=2, drop_last=True)
    settings: dict[str, Any] = {"validation": None, "loader": loader}
    whole = fitted("resnet", METHODS["abnn"], cache=False, **settings)
    found = fitted("resnet", METHODS["abnn"], **settings)
    assert found[0].cache.endswith("features")
    assert_same(found, whole)


def samplers() -> dict[str, dict[str, Any]]:
    weights = torch.arange(1.0, EXAMPLES + 1)
    own = torch.Generator()
    return {
        "in order": {"shuffle": False},
        "of a generator": {"shuffle": True, "generator": torch.Generator()},
        "of a sampler's generator": {"sampler": RandomSampler(range(EXAMPLES), generator=own)},
        "with replacement": {"sampler": RandomSampler(range(EXAMPLES), replacement=True)},
        "some": {"sampler": SubsetRandomSampler([*range(5, 40, 2)])},
        "weighted": {"sampler": WeightedRandomSampler(weights, EXAMPLES)},
    }


@pytest.mark.parametrize("order", samplers())
def test_examples_come_in_the_loaders_order(order: str) -> None:
    settings = {"shuffle": None} | samplers()[order]
    loader = loader_of("transformer", **settings)
    whole = fitted("transformer", METHODS["abnn"], loader, cache=False)
    found = fitted("transformer", METHODS["abnn"], loader)
    assert found[0].cache.endswith("features")
    assert_same(found, whole)


@pytest.mark.parametrize("method", METHODS)
def test_interrupted_and_resumed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fitted("resnet", METHODS[method], cache=False, epochs=4)
    settings = {"epochs": 4, "checkpoint": tmp_path / "fit", "checkpoint_seconds": 0}
    add = Gradients.add
    left = iter(range(9))  # into the second epoch

    def some(self: Gradients, *args: Any) -> float:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return add(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "add", some)
        with pytest.raises(KeyboardInterrupt):
            fitted("resnet", METHODS[method], **settings)
    found = fitted("resnet", METHODS[method], **settings)
    assert found[0].cache.endswith("features")
    assert_same(found, whole)
    again = fitted("resnet", METHODS[method], **settings)
    assert again[0].cache == "none: no example is seen twice"  # it is done
    assert again[0] == found[0]


# When nothing is kept


class Items(Dataset[Any]):
    """Examples that are read through a function."""

    def __init__(self, change: Callable[[Tensor, int], Tensor], name: str = "resnet") -> None:
        self.rows = examples(name)
        self.change = change

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[index]
        return self.change(x, index), y

    def __len__(self) -> int:
        return len(self.rows)


def counted() -> Callable[[Tensor, int], Tensor]:
    reads: Counter[int] = Counter()

    def change(x: Tensor, index: int) -> Tensor:
        reads[index] += 1
        return x * reads[index]

    return change


own_generator = np.random.default_rng(0)
CHANGING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "torch": lambda x, _: x.flip(-1) if torch.rand(()) < 0.5 else x,
    "numpy": lambda x, _: x + np.random.rand(),
    "random": lambda x, _: x + random.random(),
    "its own": lambda x, _: x + own_generator.random(),
    "drawn in vain": lambda x, _: x + 0 * torch.rand(()),
    "counting": counted(),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_items_that_change_are_not_kept(kind: str, trunks: list[int]) -> None:
    loader = DataLoader(Items(CHANGING[kind]), 8, shuffle=True)
    result, _ = fitted("resnet", METHODS["bayes-adapter"], loader)
    assert "the data set's items are random" in result.cache
    assert not trunks


@pytest.mark.parametrize("order", [torch.randperm, lambda n: torch.arange(n).roll(1)])
def test_a_collate_function_that_mixes_examples_is_noticed(order: Callable[[int], Tensor]) -> None:
    def mixed(items: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(parts) for parts in zip(*items, strict=True))
        return 0.7 * x + 0.3 * x[order(len(x))], y

    result, _ = fitted("resnet", METHODS["abnn"], loader_of("resnet", collate_fn=mixed))
    assert "random, or change with their batch" in result.cache


def test_the_users_random_numbers_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    bnn, loader = late("resnet", METHODS["abnn"]), loader_of("resnet", generator=generator)
    held = list(DataLoader(examples("resnet"), 8))
    states = [torch.get_rng_state(), generator.get_state(), random.getstate()]
    result = bnn.fit(loader, epochs=2, validation=held, progress=False)
    assert result.cache.endswith("features")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert random.getstate() == states[2]


@pytest.mark.parametrize("short", [0, 3])  # the first is among those read twice, the other not
def test_examples_of_different_shapes(short: int) -> None:
    data = Items(lambda x, index: x[: 5 if index == short else 6], "transformer")
    loader = DataLoader(data, 1)  # no batch could hold them together
    whole = fitted("transformer", METHODS["abnn"], loader, cache=False)
    found = fitted("transformer", METHODS["abnn"], loader)
    reason = "could not be read" if short == 0 else "examples are of different shapes"
    assert found[0].cache.startswith("none: ")
    assert reason in found[0].cache
    assert_same(found, whole)


def test_a_trunk_is_not_run_on_inputs_of_another_size() -> None:
    """Its steps would do: they pool what they pooled when they were taped."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            pooled = functional.avg_pool2d(self.conv(x).relu(), x.shape[-1])
            return self.head(self.norm(pooled.mean((2, 3))))

    def run(**settings: Any) -> tuple[FitResult, dict[str, Tensor]]:
        bnn = bayesify.convert(network, METHODS["abnn"])
        settings = {"epochs": 2, "keep": "last", "progress": False} | settings
        result = bnn.fit(loader_of("resnet"), validation=held, **settings)
        return result, bnn.posterior.tensors()

    network = Pooling().eval()
    held = [(torch.randn(8, 3, 16, 16), torch.randint(0, 3, (8,)))]
    found = run()
    assert "examples are of different shapes" in found[0].cache
    assert_same(found, run(cache=False))


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ((x.flip(-1), y) for x, y in super().__iter__())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(examples("resnet"))


def unkept() -> dict[str, tuple[Any, dict[str, Any], str]]:
    plain, batches = loader_of("resnet"), list(loader_of("resnet"))
    stay = {"num_workers": 1, "persistent_workers": True}
    no_loader = "the loader is no plain DataLoader"
    return {
        "one epoch": (plain, {"epochs": 1}, "no example is seen twice"),
        "augmented": (plain, {"augment": "crop-flip"}, "inputs are augmented"),
        "mixed": (plain, {"precision": "bf16"}, "precision is mixed"),
        "batches": (batches, {}, no_loader),
        "stream": (DataLoader(Stream(), 8), {"num_examples": EXAMPLES}, no_loader),
        "own loader": (OwnLoader(examples("resnet"), 8), {}, no_loader),
        "workers that stay": (loader_of("resnet", **stay), {}, no_loader),
        "large": (plain, {"cache_bytes": 10_000}, "more than cache_bytes=10000"),
    }


@pytest.mark.parametrize("case", unkept())
def test_what_is_not_kept_is_said(case: str) -> None:
    loader, settings, reason = unkept()[case]
    result, _ = fitted("resnet", METHODS["abnn"], loader, **settings)
    assert result.cache.startswith("none: ")
    assert reason in result.cache


def test_outliers_and_statistics_that_adapt_need_inputs() -> None:
    doubting = BayesAdapter(draws=2)
    result, _ = fitted("resnet", doubting, ood=[torch.randn(8, 3, 8, 8)])
    assert result.cache == "none: there are outliers"
    result, _ = fitted("resnet", BayesAdapter(draws=2, adapt_statistics=True))
    assert result.cache == "none: running statistics adapt"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"cache": 3}, "cache=3 must be True, False or a folder"),
        ({"cache": None}, "cache=None must be"),
        ({"cache": "/no/such/folder"}, "'/no/such/folder' is not a folder"),
        ({"cache_bytes": 0}, "cache_bytes=0 must be"),
        ({"cache_bytes": 1.5}, "cache_bytes=1.5 must be"),
        ({"cache_bytes": True}, "cache_bytes=True must be"),
    ],
)
def test_bad_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        fitted("resnet", METHODS["abnn"], **settings)


# The file


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        torch.randn(7, 3, 2),
        torch.randn(7).double(),
        torch.arange(7),
        torch.rand(7, 1) > 0.5,
        torch.randn(7, 5).bfloat16(),
    ]
    store = Store(rows, tmp_path)
    store.append([t[:4] for t in rows])
    store.append([t[4:] for t in rows])
    some = torch.tensor([6, 0, 0, 3])
    found = store.read(some)
    assert all(map(torch.equal, found, [t[some] for t in rows]))
    found[0].zero_()
    assert torch.equal(store.read(some)[0], rows[0][some])
    assert not list(tmp_path.iterdir())  # it has no name
    store.close()


def test_a_full_disk_means_no_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: Store, tensors: object) -> None:
        raise OSError(28, "No space left on device")

    whole = fitted("resnet", METHODS["abnn"], cache=False)
    monkeypatch.setattr(Store, "append", full)
    found = fitted("resnet", METHODS["abnn"], cache=tmp_path)
    assert "No space left" in found[0].cache
    assert_same(found, whole)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_an_error_leaves_neither_file_nor_runner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bnn = late("resnet", METHODS["abnn"])
    x = examples("resnet").tensors[0][:4]
    before = bnn.predict(x).probs
    for owner, name in ((Gradients, "add_penalty"), (Store, "append")):
        files = open_files()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                bnn.fit(loader_of("resnet"), epochs=2, cache=tmp_path, progress=False)
        assert open_files() == files
        assert not list(tmp_path.iterdir())
        torch.testing.assert_close(bnn.predict(x).probs, before)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_features as t
from bayesify.gradients import Gradients
def kill(*args):
    assert os.listdir(os.environ["TMPDIR"]) == [], os.listdir(os.environ["TMPDIR"])
    os.kill(os.getpid(), signal.SIGKILL)
Gradients.add_penalty = kill
t.fitted("resnet", t.METHODS["abnn"])
"""


def test_killed_it_leaves_nothing(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_why_nothing_was_kept_is_not_part_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gradients, "add_penalty", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        fitted("resnet", METHODS["abnn"], cache=False)
    assert raised.value.__context__ is None
