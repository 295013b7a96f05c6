import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, DataError, Method, Mixture
from bayesify.batches import as_inputs
from bayesify.evaluation.attacks import fgsm
from conftest import small_cnn

METHODS = [
    ABNN(members=2, draws=8),
    BayesAdapter(draws=4),
    IBNN(components=2, draws=8),
    Mixture(parts=[ABNN(members=2), BayesAdapter()], draws=8),
]
ABNN_PAIRS = ABNN(members=1, noise=0.1, draws=8)


def outputs(bnn: bayesify.BayesianModel, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(bnn.outputs(as_inputs(x))))


def symmetric(stripes: tuple[Tensor, Tensor], rows: slice) -> DataLoader[tuple[Tensor, ...]]:
    """The stripes that run as before in the mirror."""
    x, y = stripes[0][rows], stripes[1][rows]
    return DataLoader(TensorDataset(x[y < 2], y[y < 2]), batch_size=50)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_second_draw_of_a_component_sees_images_mirrored(
    cnn: nn.Module, images: Tensor, method: Method, untouched: Callable[..., object]
) -> None:
    with untouched(cnn):
        plain, bnn = bayesify.convert(cnn, method), bayesify.convert(cnn, method)
        bnn.mirrored = True
        plain.strategy = "looped"
        one, other = outputs(plain, images), outputs(plain, images.flip(-1))
        odd = (torch.arange(method.draws) // method.components % 2 == 1).view(-1, 1, 1)
        expected = torch.where(odd, other, one)
        assert not torch.allclose(one, expected)
        for bnn.strategy in ("looped", "vectorised", "folded", "stacked"):
            torch.testing.assert_close(outputs(bnn, images), expected, atol=1e-5, rtol=1e-5)
        index = method.components  # the first that is mirrored
        with torch.no_grad():
            torch.testing.assert_close(bnn.sample(0, index)(images), expected[index])


def test_without_noise_nothing_is_mirrored(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN_PAIRS)
    bnn.mirrored, bnn.noise, bnn.strategy = True, 0.0, "looped"
    with torch.no_grad():
        expected = cnn(images)
        assert torch.equal(outputs(bnn, images), expected.expand(8, -1, -1))
        assert torch.equal(bnn.sample(0, 1)(images), expected)


def test_files_and_copies_keep_it(cnn: nn.Module, images: Tensor, tmp_path: Path) -> None:
    bnn = bayesify.convert(cnn, ABNN_PAIRS)
    bnn.mirrored = True
    assert "mirrored" in repr(bnn)
    bnn.save(tmp_path / "bnn")
    probs = bnn.predict(images).probs
    for other in (bayesify.load(tmp_path / "bnn", cnn), copy.deepcopy(bnn)):
        assert other.mirrored
        assert torch.equal(other.predict(images).probs, probs)
    file = tmp_path / "bnn" / "bayesify.json"
    description = json.loads(file.read_text())
    del description["mirrored"]  # as earlier versions wrote it
    file.write_text(json.dumps(description))
    assert not bayesify.load(tmp_path / "bnn", cnn).mirrored


def test_predictions_that_stop_early_and_attacks_take_it(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN_PAIRS)
    bnn.mirrored = True
    every_draw = bnn.predict(images, tolerance=1e-9)
    assert (every_draw.used == 8).all()
    torch.testing.assert_close(every_draw.probs, bnn.predict(images).probs)

    target = bnn.predict(images).label
    leaf = images.clone().requires_grad_()
    nn.functional.nll_loss(bnn(leaf), target).backward()
    assert leaf.grad is not None
    x = images.sigmoid()  # pixels
    attacked = fgsm(bnn, x, target, radius=0.1)
    leaf = x.clone().requires_grad_()
    nn.functional.nll_loss(bnn(leaf), target).backward()
    moved = (attacked - x).abs() > 1e-3
    assert torch.equal((attacked - x)[moved].sign(), leaf.grad[moved].sign())


class LeftHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 8 * x[..., :4].mean((2, 3))


@pytest.mark.parametrize("both", [True, False])
def test_fit_mirrors_where_that_is_likelier(both: bool) -> None:
    """A network that looks to the left, and a class that shows on both sides or on one."""
    bnn = bayesify.convert(nn.Sequential(LeftHalf(), nn.BatchNorm1d(2)).eval(), ABNN_PAIRS)
    target = torch.arange(400) % 2
    signal = nn.functional.one_hot(target, 2)[:, :, None, None] * torch.ones(8)
    signal[..., 4:] *= both
    data = DataLoader(TensorDataset(signal + 3 * torch.randn(400, 2, 8, 8), target), batch_size=50)
    result = bnn.fit(data, validation=data, keep="last", augment="crop-flip", progress=False)
    assert result.mirrored == bnn.mirrored == both
    assert ("half of the draws mirrored" in str(result)) == both
    nlls = []
    for bnn.mirrored in (False, True):
        bnn.calibrate(data)
        nlls.append(bnn.evaluate(data).nll)
    assert (nlls[1] < nlls[0]) == both


def test_another_fit_takes_it_back_where_it_no_longer_helps() -> None:
    bnn = bayesify.convert(nn.Sequential(LeftHalf(), nn.BatchNorm1d(2)).eval(), ABNN_PAIRS)
    bnn.mirrored = True
    target = torch.arange(200) % 2
    x = nn.functional.one_hot(target, 2)[:, :, None, None] * torch.tensor([1.0] * 4 + [0.0] * 4)
    data = [(x.expand(-1, -1, 8, -1) + 3 * torch.randn(200, 2, 8, 8), target)]
    bnn.fit(data, validation=data, keep="last", mirror=False, progress=False)
    assert bnn.mirrored
    bnn.fit(data, validation=data, keep="last", mirror=True, progress=False)
    assert not bnn.mirrored


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        (None, {"augment": None}),
        (None, {"augment": "crop-flip", "temper": False}),
        (None, {"augment": "crop-flip", "mirror": False}),
        (1, {"augment": "crop-flip"}),  # draws share what stands before, which sees one image
    ],
)
def test_fit_mirrors_nothing_else(
    trained: nn.Module,
    stripes: tuple[Tensor, Tensor],
    where: int | None,
    settings: dict[str, object],
) -> None:
    bnn = bayesify.convert(trained, ABNN_PAIRS, where=where)
    data, held = symmetric(stripes, slice(300)), symmetric(stripes, slice(300, 600))
    result = bnn.fit(data, validation=held, progress=False, **settings)  # type: ignore[arg-type]
    assert not result.mirrored
    assert not bnn.mirrored


def test_a_mixture_is_mirrored_as_a_whole(
    trained: nn.Module, stripes: tuple[Tensor, Tensor]
) -> None:
    bnn = bayesify.convert(trained, Mixture(parts=[ABNN_PAIRS, BayesAdapter()], draws=8))
    data, held = symmetric(stripes, slice(300)), symmetric(stripes, slice(300, 600))
    result = bnn.fit(data, validation=held, epochs=1, keep="last", mirror=True, progress=False)
    assert result.mirrored
    assert str(result).endswith("half of the draws mirrored")
    assert not any(part.mirrored for part in result.parts)


def test_outputs_for_each_pixel_are_not_mirrored() -> None:
    network = nn.Sequential(*list(small_cnn())[:6])
    data = [(torch.randn(6, 1, 8, 8), torch.randint(0, 8, (6, 8, 8))) for _ in range(2)]
    bnn = bayesify.convert(network, ABNN_PAIRS)
    assert not bnn.fit(data, validation=data, augment="crop-flip", progress=False).mirrored


def test_other_inputs_are_refused() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    bnn = bayesify.convert(network, ABNN_PAIRS)
    bnn.mirrored = True
    with pytest.raises(DataError, match=r"mirrored draws see images.*shape \[1, 3\]"):
        bnn.predict(torch.zeros(2, 3))
