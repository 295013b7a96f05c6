import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import (
    MCDropout,
    NothingToRandomiseError,
    SettingError,
    UnsupportedNetworkError,
)
from bayesify.batches import as_inputs
from bayesify.methods import make_method


class Encoder(nn.Module):
    """torch's own transformer, which has a fast path and makes nested tensors of padded batches."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=dropout)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


class Bert(nn.Module):
    """Transformer layers as transformers has them: dropout after every linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.attention_dropout = nn.Dropout(0.2)
        self.output = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.LayerNorm(8))
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.words(input_ids)
        q, k, v = (
            f(h).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        weights = self.attention_dropout((q @ k.mT / 2).softmax(-1))
        h = h + self.output((weights @ v).transpose(1, 2).flatten(2))
        return self.classifier(h[:, 0])


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(6, 4, 3), nn.Flatten(),
        nn.Dropout(0.5, inplace=True), nn.Linear(64, 16), nn.ReLU(), nn.AlphaDropout(0.2),
        nn.Linear(16, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], object]]] = {
    "vgg": (vgg, lambda: torch.randn(5, 1, 8, 8)),
    "none": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten(),
            nn.Linear(24, 3),
        ),
        lambda: torch.randn(5, 2, 10),
    ),
    "bert": (Bert, lambda: {"input_ids": torch.randint(0, 20, (5, 7))}),
    "encoder": (lambda: Encoder(0.1), lambda: torch.randn(5, 6, 16)),
    "encoder-none": (lambda: Encoder(0.0), lambda: torch.randn(5, 6, 16)),
}  # fmt: skip


@pytest.fixture(params=list(NETWORKS))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, object]:
    build, example = NETWORKS[request.param]
    return build().eval(), example()


def outputs(bnn: bayesify.BayesianModel, x: object, draws: int = 4) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(bnn.outputs(as_inputs(x), draws=draws)))


def call(network: nn.Module, x: object) -> Tensor:
    with torch.no_grad():
        return network(**x) if isinstance(x, dict) else network(x)


# torch's own advice on kernels that are slow under vmap
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_battery(
    case: tuple[nn.Module, object], tmp_path: Path, untouched: Callable[..., object]
) -> None:
    network, x = case
    with untouched(network):
        bnn = bayesify.convert(network, MCDropout(rate=0.03))
        bnn.strategy = "vectorised"
        vectorised = outputs(bnn, x)
        bnn.strategy = "looped"
        looped = outputs(bnn, x)
        torch.testing.assert_close(vectorised, looped, atol=1e-5, rtol=1e-5)
        assert (looped.std(0) > 0).all(), "draws must differ"
        assert torch.equal(outputs(bnn, x), looped)
        torch.testing.assert_close(call(bnn.sample(0, 1), x), looped[1])

        bnn.save(tmp_path / "bnn")
        loaded = bayesify.load(tmp_path / "bnn", network)
        loaded.strategy = "looped"
        assert torch.equal(outputs(loaded, x), looped)
        assert torch.equal(outputs(copy.deepcopy(loaded), x, draws=2), looped[:2])

        bnn.noise = 0.0
        assert torch.equal(outputs(bnn, x), call(network, x).expand(4, -1, -1))
        assert torch.equal(call(bnn.sample(0), x), call(network, x))


def test_nothing_trains_and_nothing_is_stored(case: tuple[nn.Module, object]) -> None:
    bnn = bayesify.convert(case[0], MCDropout())
    assert not bnn.trainable()
    assert not bnn.posterior.tensors()
    assert MCDropout().optimizer(bnn.posterior, 100) is None


@pytest.mark.parametrize("noise", [1.0, 0.4])
def test_masks_have_the_rate_of_their_layer(noise: float) -> None:
    network = nn.Sequential(nn.Linear(2, 1000), nn.Dropout(0.3), nn.Linear(1000, 1000))
    posterior = bayesify.convert(network, MCDropout(noise=noise)).posterior
    mask = posterior.draws(0, range(40))["1.input_scale"]
    dropped = mask < 1
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=4 * (0.21 / 40_000) ** 0.5)
    torch.testing.assert_close(mask[dropped], torch.full_like(mask[dropped], 1 - noise))
    kept = 1 + noise * (1 / 0.7 - 1)
    torch.testing.assert_close(mask[~dropped], torch.full_like(mask[~dropped], kept))
    assert mask.std().item() == pytest.approx(noise * (0.3 / 0.7) ** 0.5, rel=0.02)
    assert not torch.equal(mask[0], mask[1])


def test_dropout_is_that_of_torch_on_average() -> None:
    """Many draws have the mean and variance of the layer in training mode, on one example."""
    network = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.4), nn.Linear(50, 2))
    x = torch.randn(1, 3)
    bnn = bayesify.convert(network, MCDropout())
    ours = outputs(bnn, x, draws=2000)[:, 0]
    theirs = network.train()(x.expand(20_000, -1)).detach()
    error = (ours.var(0) / 2000 + theirs.var(0) / 20_000).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 4 * error).all()
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.08, atol=0)


def test_inserted_masks_scale_what_layers_take() -> None:
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    bnn = bayesify.convert(network, MCDropout(rate=0.5))
    x = torch.randn(5, 3)
    masks = bnn.posterior.draws(0, range(4))
    assert list(masks) == ["2.input_scale"]  # the first layer takes the raw input
    expected = torch.stack([network[2](network[:2](x) * mask) for mask in masks["2.input_scale"]])
    torch.testing.assert_close(outputs(bnn, x), expected.detach())


def test_masks_of_attention_scale_its_projections() -> None:
    """`nn.MultiheadAttention` uses its projections without calling a layer."""
    bnn = bayesify.convert(Encoder(0.0).eval(), MCDropout(rate=0.5), where="*.1.*_proj*")
    draw = bnn.posterior.draws(0, range(2))
    assert list(draw) == [
        "encoder.layers.1.self_attn.in_proj_weight",
        "encoder.layers.1.self_attn.out_proj.weight",
    ]
    for name, value in draw.items():
        ratio = value / bnn.network.get_parameter(name)
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
        assert set(ratio.round(decimals=4).unique().tolist()) == {0.0, 2.0}


def test_own_layers_or_inserted_ones(cnn: nn.Module) -> None:
    def names(network: nn.Module, **settings: bool) -> list[str]:
        return [site.name for site in bayesify.plan(network, MCDropout(**settings)).sites]

    assert names(vgg()) == names(vgg(), insert=False)
    assert names(vgg()) == ["2.input_scale", "5.input_scale", "8.input_scale"]
    assert names(vgg(), insert=True) == ["3.input_scale", "6.input_scale", "9.input_scale"]
    assert names(cnn) == ["3.input_scale", "8.input_scale"]
    off = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.0), nn.Linear(3, 2))
    assert names(off) == ["2.input_scale"]
    for network, settings in ((off, {"insert": False}), (nn.Linear(2, 3), {})):
        with pytest.raises(NothingToRandomiseError, match="no place for dropout"):
            names(network, **settings)


def test_plan_shows_what_is_left_out() -> None:
    planned = bayesify.plan(
        Encoder(0.1), MCDropout(), where=["*.0.*", "encoder.layers.1.dropout.*"]
    )
    assert len(planned.sites) == 4
    assert "encoder.layers.1.dropout.input_scale" in str(planned)
    assert "skipped encoder.layers.0.self_attn (MultiheadAttention)" in str(planned)
    certain = nn.Sequential(nn.Linear(2, 3), nn.Dropout(1.0), nn.Dropout(0.1), nn.Linear(3, 2))
    assert [skip.name for skip in bayesify.plan(certain, MCDropout()).skipped] == ["1"]


def test_where_keeps_the_other_layers_off() -> None:
    network = vgg().eval()
    bnn = bayesify.convert(network, MCDropout(), where=1)
    x = torch.randn(5, 1, 8, 8)
    hidden = network[:8](x)
    masks = bnn.posterior.draws(0, range(4))["8.input_scale"][:, :16]
    expected = torch.stack([network[9](hidden * mask) for mask in masks])
    torch.testing.assert_close(outputs(bnn, x), expected.detach())


@pytest.mark.parametrize(
    ("layer", "shape", "dimension"),
    [
        (nn.Dropout(), (2, 5), 1),
        (nn.Dropout(), (2, 3, 5), 2),
        (nn.Dropout(), (2, 5, 3, 4), 1),
        (nn.Dropout(), (2, 5, 3, 4, 2), 1),
        (nn.AlphaDropout(), (2, 3, 5), 2),
        (nn.Dropout1d(), (2, 5, 3), 1),
        (nn.Dropout2d(), (2, 5, 3, 4), 1),
        (nn.Dropout3d(), (2, 5, 3, 4, 2), 1),
        (nn.FeatureAlphaDropout(), (2, 5, 3), 1),
    ],
    ids=str,
)
def test_a_mask_is_drawn_for_each_feature_or_channel(
    layer: nn.Module, shape: tuple[int, ...], dimension: int
) -> None:
    network = nn.Sequential(layer, nn.Linear(7, 2)).eval()
    MCDropout().find(network)
    layer.get_buffer("input_scale").copy_(torch.arange(7))
    out = layer(torch.ones(shape)).movedim(dimension, -1)
    assert torch.equal(out, torch.arange(5.0).expand_as(out))


def test_more_features_than_any_parameter_has() -> None:
    network = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    x = torch.randn(2, 2, 30)
    bnn = bayesify.convert(network, MCDropout())
    with pytest.raises(UnsupportedNetworkError, match=r"gets 28 features.*insert=True"):
        bnn.predict(x)
    assert len(bayesify.convert(network, MCDropout(insert=True)).predict(x)) == 2


def test_a_draw_is_one_function(case: tuple[nn.Module, object]) -> None:
    network, x = case
    bnn = bayesify.convert(network, MCDropout(draws=4, rate=0.3))
    bnn.strategy = "looped"
    whole = bnn.predict(x).probs
    torch.testing.assert_close(bnn.predict(x, batch_size=2).probs, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_padded_batches_of_torchs_transformer(dropout: float) -> None:
    """Neither the fast path nor nested tensors get past a gate."""
    network = Encoder(dropout).eval()
    x = torch.randn(4, 6, 16)
    padding = torch.arange(6) >= torch.tensor([6, 4, 3, 5]).unsqueeze(1)
    bnn = bayesify.convert(network, MCDropout(rate=0.03))
    bnn.strategy = "looped"
    assert (outputs(bnn, (x, padding)).std(0) > 1e-4).all()
    bnn.noise = 0.0
    with torch.no_grad():
        assert torch.equal(outputs(bnn, (x, padding))[0], network(x, padding))


def test_it_follows_the_model() -> None:
    x = torch.randn(5, 1, 8, 8)
    bnn = bayesify.convert(vgg(), MCDropout())
    single = outputs(bnn, x)
    double = outputs(bnn.double(), x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single)
    assert outputs(bnn.to(torch.bfloat16), x.bfloat16()).dtype == torch.bfloat16


def overconfident(network: nn.Module) -> nn.Module:
    """A network whose logits are so large that any doubt helps."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in network[-1].parameters():
            parameter.mul_(5)
    return network


@pytest.mark.filterwarnings("ignore:training did not help")
def test_fit_keeps_the_better_of_network_and_posterior(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    bad = bayesify.convert(trained, MCDropout(rate=0.9))
    result = bad.fit(loader, validation=validation, progress=False)
    assert (result.kept, result.steps, bad.noise) == ("network", 0, 0.0)
    assert result.nll == result.network_nll < result.untrained_nll
    good = bayesify.convert(overconfident(trained), MCDropout(rate=0.03))
    result = good.fit(loader, validation=validation, progress=False)
    assert (result.kept, good.noise) == ("untrained", 1.0)
    assert result.nll == result.untrained_nll < result.network_nll


def test_calibrate_finds_the_strength(
    trained: nn.Module, validation: DataLoader, test_set: DataLoader
) -> None:
    bnn = bayesify.convert(trained, MCDropout(rate=0.5))
    before = bnn.evaluate(test_set).nll
    chosen = bnn.calibrate(validation)
    assert bnn.noise == chosen.noise < 1
    assert bnn.evaluate(test_set).nll < before


def test_settings() -> None:
    method = MCDropout(rate=0.2, insert=True)
    assert make_method("mc-dropout", json.loads(json.dumps(method.to_dict()))) == method
    for wrong in ({"rate": 0.0}, {"rate": 1.0}, {"rate": float("nan")}, {"insert": "yes"}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            MCDropout(**wrong)
