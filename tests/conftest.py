"""What all tests share: small networks of every kind, made and not trained."""

import copy
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from bayesify.zoo import CifarResNet

# A shared machine stalls now and then: time limits are pytest's.
settings.register_profile("bayesify", deadline=None)
settings.load_profile("bayesify")

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a compiler"
)


def heed_interrupts() -> None:
    """For `Popen(preexec_fn=)`: shells start background jobs deaf to Ctrl-C, tests included."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def small_cnn(classes: int = 4) -> nn.Module:
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )
    with torch.no_grad():  # statistics and scales as a trained network's: not all 0 and 1
        for layer in network:
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0, 0.3)
                layer.running_var.uniform_(0.5, 2)
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.3)
    return network.eval()


def small_resnet() -> nn.Module:
    torch.manual_seed(3)
    network = CifarResNet(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return network.eval()


class Counting(TorchDispatchMode):
    """Counts the operations done inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cnn() -> nn.Module:
    return small_cnn()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(12, 1, 8, 8)


@pytest.fixture(scope="session")
def stripes() -> tuple[Tensor, Tensor]:
    """A task that a small network learns in seconds, with some noise: which way stripes run."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (600,), generator=generator)
    grid = torch.arange(8.0)
    rows, columns = torch.meshgrid(grid, grid, indexing="ij")
    waves = torch.stack([rows, columns, rows + columns, rows - columns])
    phase = 6.28 * torch.rand(600, 1, 1, generator=generator)
    x = torch.sin(waves[labels] * 1.3 + phase) + 1.5 * torch.randn(600, 8, 8, generator=generator)
    return x.unsqueeze(1), labels


@pytest.fixture(scope="session")
def trained(stripes: tuple[Tensor, Tensor]) -> nn.Module:
    """A network trained a little on the first half of `stripes`."""
    x, y = stripes[0][:300], stripes[1][:300]
    torch.manual_seed(0)
    network = small_cnn().train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(12):
        for rows in torch.randperm(300).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    return network.eval()


@pytest.fixture
def loader(stripes: tuple[Tensor, Tensor]) -> DataLoader:
    return DataLoader(
        TensorDataset(stripes[0][:300], stripes[1][:300]), batch_size=50, shuffle=True
    )


@pytest.fixture
def validation(stripes: tuple[Tensor, Tensor]) -> DataLoader:
    return DataLoader(TensorDataset(stripes[0][300:450], stripes[1][300:450]), batch_size=50)


@pytest.fixture
def test_set(stripes: tuple[Tensor, Tensor]) -> DataLoader:
    return DataLoader(TensorDataset(stripes[0][450:], stripes[1][450:]), batch_size=50)


def state_of(network: nn.Module) -> dict[str, object]:
    """Everything of a network that a user could see change."""
    return {
        "tensors": {name: value.clone() for name, value in network.state_dict().items()},
        "identities": [id(parameter) for parameter in network.parameters()],
        "gradients": [parameter.requires_grad for parameter in network.parameters()],
        "modes": [module.training for module in network.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in network.modules()
        ],
        "grads": [parameter.grad is None for parameter in network.parameters()],
    }


@pytest.fixture
def untouched() -> Callable[[nn.Module], object]:
    """A context in which a network must not change in any way."""

    @contextmanager
    def check(network: nn.Module) -> Iterator[None]:
        before = copy.deepcopy(state_of(network))
        try:
            yield
        finally:
            after = state_of(network)
            tensors = after.pop("tensors")
            for name, value in before.pop("tensors").items():
                assert torch.equal(tensors[name], value), name
            assert after == before

    return check


@pytest.fixture
def gradients() -> Iterator[list[dict[int, Tensor]]]:
    """Each step's gradients by the parameter's id, before an optimizer adds anything to them."""
    found: list[dict[int, Tensor]] = []

    def note(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        trained = (p for group in optimizer.param_groups for p in group["params"])
        found.append({id(p): p.grad.clone() for p in trained if p.grad is not None})

    handle = register_optimizer_step_pre_hook(note)
    yield found
    handle.remove()
