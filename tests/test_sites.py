import pytest
import torch
from torch import Tensor, nn

import bayesify
from architectures import Shared, ZeroCentredRMSNorm
from bayesify import ABNN, BayesAdapter, NothingToRandomiseError, SettingError, UnknownSiteError
from bayesify.sites import find_norms, select, slots


class FusedNorm(nn.BatchNorm2d):
    """A norm with an activation inside, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ScaleNorm(nn.Module):
    """A norm with a scale by another name, and one number for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True) * self.g


class ResponseNorm(nn.Module):
    """Called a norm, but its tensor does not scale what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.square()


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm2d(3),
        nn.BatchNorm3d(3),
        nn.SyncBatchNorm(3),
        nn.LayerNorm(3),
        nn.LayerNorm((3, 4)),
        nn.GroupNorm(1, 3),
        nn.InstanceNorm1d(3, affine=True),
        nn.InstanceNorm2d(3, affine=True),
        nn.InstanceNorm3d(3, affine=True),
        nn.RMSNorm(3),
        FusedNorm(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_are_found(layer: nn.Module) -> None:
    sites, skipped = find_norms(nn.Sequential(layer))
    assert not skipped
    (site,) = sites
    assert site.name == "0.weight"
    assert site.shape == tuple(layer.weight.shape)
    assert site.kind == type(layer).__name__
    assert site.offset == 0
    assert site.shifts == (() if isinstance(layer, nn.RMSNorm) else ("0.bias",))


def test_offset_is_found_by_probing() -> None:
    layer = ZeroCentredRMSNorm(3)
    with torch.no_grad():
        layer.weight.normal_()
    before = layer.weight.clone()
    ((site,), _) = find_norms(nn.Sequential(layer))
    assert site.offset == 1
    assert torch.equal(layer.weight, before)


def test_gemma_stores_gamma_minus_one() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    sites, _ = find_norms(nn.Sequential(GemmaRMSNorm(4), LlamaRMSNorm(4)))
    assert [site.offset for site in sites] == [1, 0]


def test_scale_by_another_name() -> None:
    ((site,), _) = find_norms(nn.Sequential(ScaleNorm()))
    assert (site.name, site.shape) == ("0.g", (1,))


def test_what_cannot_be_a_site_is_said() -> None:
    network = nn.Sequential(
        nn.LayerNorm(3, elementwise_affine=False), ResponseNorm(), nn.LazyBatchNorm1d()
    )
    sites, skipped = find_norms(network)
    assert not sites
    reasons = [(skip.name, skip.reason) for skip in skipped]
    assert reasons[0] == ("0", "no learnable scale")
    assert reasons[1] == ("1", "no tensor of it scales the normalised input")
    assert "run the network once" in reasons[2][1]


def test_shared_modules_and_tensors_are_one_site() -> None:
    sites, _ = find_norms(Shared())
    assert [site.name for site in sites] == ["norm.weight"]
    assert sites[0].shifts == ("norm.bias", "other.bias")
    assert slots(Shared())["norm.weight"] == ("norm.weight", "other.weight")


@pytest.fixture
def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(5)))


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (None, ["0.1.weight", "1.1.weight", "2.1.weight", "3.1.weight", "4.1.weight"]),
        (1.0, ["0.1.weight", "1.1.weight", "2.1.weight", "3.1.weight", "4.1.weight"]),
        (0.5, ["2.1.weight", "3.1.weight", "4.1.weight"]),
        (0.4, ["3.1.weight", "4.1.weight"]),
        ("3.*", ["3.1.weight"]),
        (["0.*", "[34].*"], ["0.1.weight", "3.1.weight", "4.1.weight"]),
        (2, ["3.1.weight", "4.1.weight"]),
        (lambda name: name.startswith("1"), ["1.1.weight"]),
    ],
)
def test_where(deep: nn.Module, where: object, names: list[str]) -> None:
    assert [site.name for site in bayesify.plan(deep, where=where).sites] == names


@pytest.mark.parametrize("where", ["9.*", ["0.*", "typo*"], lambda name: False, 0, 6, -1, True])
def test_where_that_matches_nothing(deep: nn.Module, where: object) -> None:
    with pytest.raises(UnknownSiteError, match=r"0\.1\.weight, 1\.1\.weight"):
        bayesify.convert(deep, where=where)


def test_where_names_the_pattern_that_missed(deep: nn.Module) -> None:
    with pytest.raises(UnknownSiteError, match=r"no site matches 'typo\*'\."):
        select(find_norms(deep)[0], ["0.*", "typo*"])


@pytest.mark.parametrize("where", [2.5, 0.0, -0.5, float("nan")])
def test_no_fraction(deep: nn.Module, where: float) -> None:
    with pytest.raises(UnknownSiteError, match="a fraction must be above 0 and at most 1"):
        bayesify.convert(deep, where=where)


@pytest.mark.parametrize("where", [[1, 2], object()])
def test_where_of_no_known_kind(deep: nn.Module, where: object) -> None:
    with pytest.raises(SettingError, match="must be a glob"):
        bayesify.convert(deep, where=where)


def test_execution_order() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.LayerNorm(3)
            self.first = nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    network = Backwards()
    assert bayesify.plan(network, where=1).sites[0].name == "first.weight"
    x = torch.randn(2, 3)
    assert bayesify.plan(network, where=1, example=x).sites[0].name == "last.weight"
    assert not network.first._forward_pre_hooks


def test_a_layer_that_is_not_called_runs_with_the_module_around_it() -> None:
    """Attention uses the weight of its last projection without calling it."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0].mean(1))

    found = bayesify.plan(Attending(), BayesAdapter(), where=2, example=torch.randn(2, 3, 4))
    assert [site.name for site in found.sites] == ["head.weight", "head.bias"]


def test_network_without_norms() -> None:
    with pytest.raises(NothingToRandomiseError, match="BayesAdapter"):
        bayesify.convert(nn.Linear(2, 2))
    frozen = nn.Sequential(nn.LayerNorm(2, elementwise_affine=False))
    with pytest.raises(NothingToRandomiseError, match="1 were skipped.*no learnable scale"):
        bayesify.convert(frozen)


def test_plan(deep: nn.Module) -> None:
    found = bayesify.plan(deep, ABNN(members=3), where=2)
    assert found.random_numbers == 2 * 4
    assert found.trainable == 3 * 2 * (4 + 4)
    assert found.fraction == pytest.approx(48 / (5 * (20 + 8)))
    assert found.bytes == 4 * 48
    assert "4.1.weight" in str(found)
    assert "34.29%" in str(found)


def test_plan_says_what_is_skipped() -> None:
    network = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3, elementwise_affine=False))
    assert "skipped 1 (LayerNorm): no learnable scale" in str(bayesify.plan(network))


def test_plan_wants_a_network_and_a_method(cnn: nn.Module) -> None:
    with pytest.raises(SettingError, match=r"torch\.nn\.Module"):
        bayesify.plan("resnet18")
    with pytest.raises(SettingError, match="such as ABNN"):
        bayesify.plan(cnn, ABNN)
