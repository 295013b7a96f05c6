"""Norms with a row of scales for each example do what a loop over the examples does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesify
from bayesify import ABNN
from bayesify.batches import as_inputs
from bayesify.gradients import Gradients
from bayesify.rows import Rows

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch 1d": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "batch 1d, sequences": (lambda: nn.BatchNorm1d(4), (3, 4, 5)),
    "batch 2d": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 6)),
    "batch 3d": (lambda: nn.BatchNorm3d(4), (3, 4, 5, 6, 2)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 6)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 6)),
    "layer": (lambda: nn.LayerNorm(4), (3, 5, 4)),
    "layer without shift": (lambda: nn.LayerNorm(4, bias=False), (3, 5, 4)),
    "layer over two dimensions": (lambda: nn.LayerNorm((6, 4)), (3, 5, 6, 4)),
    "rms": (lambda: nn.RMSNorm(4), (3, 5, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_rows_are_a_loop_over_examples(name: str) -> None:
    make, shape = NORMS[name]
    norm, x = make().double().eval(), torch.randn(shape, dtype=torch.float64)
    rows = {
        name: torch.randn(3, *value.shape, dtype=torch.float64, requires_grad=True)
        for name, value in norm.named_parameters()
    }
    with Rows():
        together = functional_call(norm, rows, x)
        one = functional_call(norm, {name: value[0] for name, value in rows.items()}, x[:1])
    alone = [
        functional_call(norm, {name: value[i] for name, value in rows.items()}, x[i : i + 1])
        for i in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone))
    torch.testing.assert_close(one, alone[0])  # a norm without rows is as always
    weights = torch.randn(shape, dtype=torch.float64)
    ours = torch.autograd.grad((together * weights).sum(), list(rows.values()))
    loops = torch.autograd.grad((torch.cat(alone) * weights).sum(), list(rows.values()))
    torch.testing.assert_close(ours, loops)


def test_only_a_shift_can_have_rows() -> None:
    norm, x = nn.BatchNorm2d(4).eval(), torch.randn(3, 4, 2, 2)
    shift = torch.randn(3, 4)
    with Rows():
        shifted = functional_call(norm, {"bias": shift}, x)
    torch.testing.assert_close(shifted, norm(x) + shift[:, :, None, None])


def test_results_stay_in_mixed_precision() -> None:
    norm, x = nn.BatchNorm2d(4).eval(), torch.randn(3, 4, 2, 2)
    rows = {"weight": torch.rand(3, 4), "bias": torch.rand(3, 4)}
    with Rows():
        low = functional_call(norm, rows, x.bfloat16())
        full = functional_call(norm, rows, x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), full, rtol=0.02, atol=0.02)


def test_gradients_are_those_of_vmap(
    cnn: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rows in (True, False):
        gradients = Gradients(bayesify.convert(cnn, ABNN(), where=1.0), None, None, None, 0)
        if not rows:
            monkeypatch.setattr(gradients, "_runs_by_rows", lambda *_: False)
        found.append(gradients.vector(as_inputs(images), torch.arange(12) % 3, 7))
        assert list(gradients.by_rows.values()) == [rows]
        assert gradients.groups is None
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


class Attention(nn.Module):
    """A norm and attention, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.head(h.mean(1))


def test_attention_has_a_draw_for_each_example() -> None:
    gradients = Gradients(bayesify.convert(Attention().eval(), ABNN()), None, None, None, 0)
    gradients.vector(as_inputs(torch.randn(6, 5, 8)), torch.arange(6) % 3, 0)
    assert list(gradients.by_rows.values()) == [True]
    assert gradients.groups is None


class Windows(nn.Module):
    """Its norm sees parts of examples, as Swin's do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm(x.reshape(-1, 2, 4))
        return self.head(windows.tanh().reshape(x.shape).mean(1))


class OwnNorm(nn.Module):
    """A norm that scales by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (1e-6 + x.pow(2).mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("own", [False, True])
def test_rows_only_where_they_are_of_examples(steps: int, own: bool) -> None:
    """Three steps for three examples: shapes may go together, and values do not."""
    network = nn.Sequential(OwnNorm(), nn.Flatten(), nn.Linear(4 * steps, 3)) if own else Windows()
    gradients = Gradients(bayesify.convert(network.eval(), ABNN()), None, None, None, 0)
    x = torch.randn(6, steps if own else 2 * steps, 4)
    gradients.vector(as_inputs(x), torch.arange(6) % 3, 0)
    assert list(gradients.by_rows.values()) == [False]
    assert gradients.groups is None  # vmap takes it
