import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify.gates import gate_inputs, input_channels


class Conv1D(nn.Module):
    """The linear layer of GPT-2 as transformers has it: its weight is `[in, out]`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def along(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Scales a weight whose input channels run along `dim`."""

    def scale(weight: Tensor, z: Tensor) -> Tensor:
        shape = [1] * weight.ndim
        shape[dim] = -1
        return weight * z.view(shape)

    return scale


def grouped(weight: Tensor, z: Tensor) -> Tensor:
    """Two groups: the first half of the outputs sees the first half of the channels."""
    first, second = weight.chunk(2)
    halves = z.chunk(2)
    return torch.cat([along(1)(first, halves[0]), along(1)(second, halves[1])])


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6), along(1)),
    "linear-sequence": (lambda: nn.Linear(6, 4), (3, 5, 6), along(1)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9), along(1)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8), along(1)),
    "conv2d-circular": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        (2, 4, 8, 8),
        along(1),
    ),
    "conv2d-unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 8, 8), along(1)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5), along(1)),
    "conv2d-grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 8), grouped),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8), along(0)),
    "transposed-1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 9), along(0)),
    "transposed-2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5), along(0)),
    "transposed-3d": (lambda: nn.ConvTranspose3d(4, 6, 3), (2, 4, 3, 3, 3), along(0)),
    "transposed-grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
        (2, 4, 5, 5),
        along(0),
    ),
    "gpt2": (lambda: Conv1D(4, 6), (3, 5, 6), along(0)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_gate_is_a_weight_with_scaled_columns(name: str) -> None:
    """U (z o x) + b = (U diag(z)) x + b."""
    make, shape, scale = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    gated = copy.deepcopy(layer)
    (site,) = gate_inputs(gated)
    assert site.name == "input_scale"
    assert site.shape == (input_channels(layer),)
    assert torch.equal(gated(x), layer(x)), "ones leave every bit"
    z = torch.randn(site.shape)
    found = functional_call(gated, {"input_scale": z}, (x,))
    expected = functional_call(layer, {"weight": scale(layer.weight, z)}, (x,))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, layer(x))
    assert torch.equal(gated(x), layer(x)), "and stay"


def test_an_input_by_keyword() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    gated = copy.deepcopy(layer)
    gate_inputs(gated)
    z = torch.randn(6)
    by_place = functional_call(gated, {"input_scale": z}, (x,))
    by_name = functional_call(gated, {"input_scale": z}, (), {"input": x})
    assert torch.equal(by_name, by_place)
    assert not torch.equal(by_place, layer(x))


ATTENTION = {
    "together": ({"embed_dim": 8, "num_heads": 2}, ["in_proj_weight"]),
    "separate": (
        {"embed_dim": 8, "num_heads": 2, "kdim": 5, "vdim": 6},
        ["q_proj_weight", "k_proj_weight", "v_proj_weight"],
    ),
}


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("biases", [False, True])
def test_attention_has_a_site_for_each_projection(kind: str, biases: bool) -> None:
    settings, weights = ATTENTION[kind]
    layer = nn.MultiheadAttention(batch_first=True, **settings).eval()
    widths = {"k_proj_weight": 5, "v_proj_weight": 6}
    expected = {f"{name}_scale": (widths.get(name, 8),) for name in weights}
    expected["out_proj.weight_scale"] = (8,)
    if biases:
        expected |= {"in_proj_bias_scale": (24,), "out_proj.bias_scale": (8,)}
    sites = gate_inputs(layer, biases=biases)
    assert {site.name: site.shape for site in sites} == expected
    tensors = dict(layer.named_parameters())
    for site in sites:
        assert site.weight == site.name.removesuffix("_scale")
        assert tensors[site.weight].shape[-1:] == site.shape
    assert not any(module._forward_pre_hooks for module in layer.modules())


def test_biases_are_scaled_element_by_element() -> None:
    network = nn.Sequential(nn.Linear(6, 4), nn.Conv1d(2, 3, 1), nn.Linear(4, 2, bias=False))
    sites = {site.name: site for site in gate_inputs(network, biases=True)}
    assert list(sites) == [
        "0.input_scale",
        "0.bias_scale",
        "1.input_scale",
        "1.bias_scale",
        "2.input_scale",
    ]
    assert sites["0.bias_scale"].shape == (4,)
    assert sites["0.bias_scale"].weight == "0.bias"
    assert len(gate_inputs(nn.Linear(6, 4))) == 1


def test_a_layer_used_twice_has_one_gate() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    network = Twice()
    sites = gate_inputs(network)
    assert [site.name for site in sites] == ["a.input_scale"]
    x, z = torch.randn(2, 4), torch.randn(4)
    found = functional_call(network, {"a.input_scale": z}, (x,), tie_weights=False)
    torch.testing.assert_close(found, network.a(z * network.a.forward(z * x)))


class OwnAttention(nn.Module):
    """As in torchvision's Swin and timm's BEiT: one layer is called, another one's weight read."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 6)
        self.called = nn.Linear(6, 3)
        nn.init.normal_(self.called.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.project.weight, self.project.bias)
        return self.called(x.to(self.called.weight.dtype))


def test_a_layer_that_is_not_called_has_its_weight_scaled() -> None:
    sites = gate_inputs(nn.Sequential(OwnAttention()), biases=True)
    assert {site.name: site.weight for site in sites} == {
        "0.project.weight_scale": "0.project.weight",
        "0.project.bias_scale": "0.project.bias",
        "0.called.input_scale": None,
        "0.called.bias_scale": "0.called.bias",
    }
    assert [site.shape for site in sites] == [(4,), (6,), (6,), (3,)]


def test_projections_that_two_attentions_share_have_one_site() -> None:
    one, two = (nn.MultiheadAttention(8, 2) for _ in range(2))
    two.in_proj_weight = one.in_proj_weight
    sites = gate_inputs(nn.ModuleDict({"one": one, "two": two}))
    assert [site.name for site in sites] == [
        "one.in_proj_weight_scale",
        "one.out_proj.weight_scale",
        "two.out_proj.weight_scale",
    ]


def test_a_gate_is_no_part_of_the_state_and_takes_the_layers_type() -> None:
    layer = nn.Linear(6, 4).double()
    gate_inputs(layer)
    assert "input_scale" not in layer.state_dict()
    assert layer.input_scale.dtype == torch.float64
    assert layer(torch.randn(2, 6).double()).dtype == torch.float64
    mixed = nn.Linear(6, 4).bfloat16()
    gate_inputs(mixed)
    mixed.input_scale = mixed.input_scale.float()
    assert mixed(torch.randn(2, 6).bfloat16()).dtype == torch.bfloat16


def test_every_gate_of_torchs_transformer_counts() -> None:
    """Its fast path does without the layers' calls, and must not be taken past a gate."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        plain = network(x)
        sites = gate_inputs(network)
        assert torch.equal(network(x), plain)
        gates = [site for site in sites if site.weight is None]
        assert {site.name for site in gates} == {
            "layers.0.linear1.input_scale",
            "layers.0.linear2.input_scale",
        }
        for site in gates:
            scaled = functional_call(network, {site.name: torch.full(site.shape, 1.5)}, (x,))
            assert not torch.allclose(scaled, plain), site.name


def test_nothing_to_scale() -> None:
    assert gate_inputs(nn.Sequential(nn.LayerNorm(3), nn.Embedding(4, 3))) == []
