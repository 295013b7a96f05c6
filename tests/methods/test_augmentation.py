import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import bayesify
from bayesify import DataError, SettingError, TestTimeAugmentation
from bayesify.batches import as_inputs
from bayesify.methods import make_method
from bayesify.methods.augmentation import move

FLIP = TestTimeAugmentation(shift=0.0, rotate=0.0, zoom=0.0)


def outputs(bnn: bayesify.BayesianModel, x: object, draws: int = 6) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(bnn.outputs(as_inputs(x), draws=draws)))


def call(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return network(x)


def affine(*rows: tuple[float, float, float]) -> Tensor:
    return torch.tensor(rows)


def test_battery(
    cnn: nn.Module, images: Tensor, tmp_path: Path, untouched: Callable[..., object]
) -> None:
    with untouched(cnn):
        bnn = bayesify.convert(cnn, TestTimeAugmentation())
        bnn.strategy = "vectorised"
        vectorised = outputs(bnn, images)
        bnn.strategy = "looped"
        looped = outputs(bnn, images)
        torch.testing.assert_close(vectorised, looped, atol=1e-5, rtol=1e-5)
        assert (looped.std(0) > 0).all(), "draws must differ"
        assert torch.equal(outputs(bnn, images), looped)
        assert torch.equal(call(bnn.sample(0, 1), images), looped[1])

        bnn.save(tmp_path / "bnn")
        loaded = bayesify.load(tmp_path / "bnn", cnn)
        loaded.strategy = "looped"
        assert torch.equal(outputs(loaded, images), looped)
        assert torch.equal(outputs(copy.deepcopy(loaded), images, draws=2), looped[:2])

        bnn.noise = 0.0
        for bnn.strategy in ("looped", "vectorised"):
            zero = outputs(bnn, images)
            torch.testing.assert_close(zero, call(cnn, images).expand_as(zero))
        bnn.strategy = "looped"
        assert torch.equal(outputs(bnn, images)[3], call(cnn, images))
        assert torch.equal(call(bnn.sample(0), images), call(cnn, images))


def test_plan_has_one_site_and_nothing_to_store(cnn: nn.Module) -> None:
    planned = bayesify.plan(cnn, TestTimeAugmentation(), where="input_map")
    assert [site.name for site in planned.sites] == ["input_map"]
    assert (planned.trainable, planned.bytes) == (0, 0)
    assert "input_map" in str(planned)


def test_the_identity_changes_no_bit() -> None:
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(move(x, torch.eye(2, 3)), x)


def test_moves_are_what_they_are_called() -> None:
    x = torch.randn(2, 3, 8, 8)
    flipped = move(x, affine((-1, 0, 0), (0, 1, 0)))
    torch.testing.assert_close(flipped, x.flip(-1))
    shifted = move(x, affine((1, 0, 2 * 2 / 8), (0, 1, -2 * 1 / 8)))  # 2 pixels across, 1 up
    torch.testing.assert_close(shifted[:, :, 1:, :-2], x[:, :, :-1, 2:])
    turned = move(x, affine((0, -1, 0), (1, 0, 0)))
    torch.testing.assert_close(turned, x.rot90(1, (-2, -1)))


def test_a_map_is_that_of_torch() -> None:
    x = torch.randn(2, 3, 9, 9)
    matrix = affine((0.9, -0.2, 0.1), (0.3, 1.1, -0.2))
    grid = functional.affine_grid(matrix.expand(2, 2, 3), [2, 3, 9, 9], align_corners=False)
    expected = functional.grid_sample(
        x, grid, mode="bicubic", padding_mode="reflection", align_corners=False
    )
    torch.testing.assert_close(move(x, matrix), expected, atol=1e-5, rtol=1e-5)


def test_oblong_images_are_turned_and_not_sheared() -> None:
    x = torch.randn(2, 3, 4, 8)
    turned = move(x, affine((0, -1, 0), (1, 0, 0)))
    torch.testing.assert_close(turned[..., 2:6], x[..., 2:6].rot90(1, (-2, -1)))


@pytest.mark.parametrize("noise", [1.0, 0.5])
def test_maps_have_the_spread_asked_for(cnn: nn.Module, noise: float) -> None:
    method = TestTimeAugmentation(noise=noise, shift=0.1, rotate=20.0, zoom=0.2)
    count = 4000
    maps = bayesify.convert(cnn, method).posterior.draws(0, range(count))["input_map"]
    area = torch.linalg.det(maps[:, :, :2])
    mirrored = area < 0
    flips = noise / 2
    assert mirrored.float().mean().item() == pytest.approx(
        flips, abs=4 * (flips * (1 - flips) / count) ** 0.5
    )
    zoom = -area.abs().log() / 2
    angle = torch.atan2(-maps[:, 0, 1], maps[:, 1, 1])
    across, down = maps[:, 0, 2] / 2, maps[:, 1, 2] / 2
    for spread, values in ((0.2, zoom), (math.radians(20), angle), (0.1, across), (0.1, down)):
        assert values.std().item() == pytest.approx(noise * spread, rel=4 / (2 * count) ** 0.5)
        assert abs(values.mean().item()) < 4 * noise * spread / count**0.5


def test_flips_are_the_network_on_mirrored_images(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, FLIP)
    plain, mirrored = call(cnn, images), call(cnn, images.flip(-1))
    kinds = set()
    for output in outputs(bnn, images, draws=12):
        near = [torch.allclose(output, other, atol=1e-5) for other in (plain, mirrored)]
        assert sum(near) == 1
        kinds.add(near.index(True))
    assert kinds == {0, 1}


def test_a_draw_is_one_function(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, TestTimeAugmentation())
    whole = bnn.predict(images).probs
    torch.testing.assert_close(bnn.predict(images, batch_size=5).probs, whole)
    assert not torch.equal(bnn.predict(images, seed=1).probs, whole)


class Pair(nn.Module):
    """Takes a number of a camera, images, and something that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))

    def forward(self, camera: Tensor, pixel_values: Tensor, extra: Tensor) -> Tensor:
        assert extra.shape[1:] == (2,)
        return self.body(pixel_values) + camera.unsqueeze(1)


def test_images_are_found_among_the_arguments() -> None:
    network = Pair()
    camera, x, extra = torch.arange(4), torch.randn(4, 3, 4, 4), torch.zeros(4, 2)
    bnn = bayesify.convert(network, FLIP)
    by_place = outputs(bnn, (camera, x, extra))
    by_name = outputs(bnn, {"pixel_values": x, "camera": camera, "extra": extra})
    assert torch.equal(by_place, by_name)
    assert (by_place.std(0) > 0).any()


@pytest.mark.parametrize(
    ("network", "x", "says"),
    [
        (nn.Linear(6, 3), torch.zeros(2, 6), r"it has shape \[1, 6\]"),
        (nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)), torch.ones(2, 2).long(),
         "there is none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["looped", "vectorised"])
def test_other_inputs_are_refused(network: nn.Module, x: Tensor, says: str, strategy: str) -> None:
    bnn = bayesify.convert(network, TestTimeAugmentation())
    bnn.strategy = strategy
    with pytest.raises(DataError, match=rf"must be \[B, C, H, W\], and {says}"):
        bnn.predict(x)


def test_it_follows_the_model(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, TestTimeAugmentation())
    single = outputs(bnn, images)
    double = outputs(bnn.double(), images.double())
    torch.testing.assert_close(double.float(), single, atol=1e-4, rtol=1e-4)
    half = bayesify.convert(copy.deepcopy(cnn).bfloat16(), TestTimeAugmentation(noise=0.0))
    half.strategy = "looped"
    x = images.bfloat16()
    assert torch.equal(outputs(half, x)[0], call(half.network, x))


def test_predictions_are_differentiable_in_the_images(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, TestTimeAugmentation())
    images.requires_grad_(True)
    bnn(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


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
    """Mirroring turns one diagonal of `stripes` into the other; small moves are harmless."""
    bad = bayesify.convert(trained, FLIP)
    result = bad.fit(loader, validation=validation, progress=False)
    assert (result.kept, result.steps, bad.noise) == ("network", 0, 0.0)
    good = bayesify.convert(overconfident(trained), TestTimeAugmentation(flip=False))
    result = good.fit(loader, validation=validation, progress=False)
    assert (result.kept, good.noise) == ("untrained", 1.0)
    assert result.nll == result.untrained_nll < result.network_nll


def test_calibrate_finds_the_strength(
    trained: nn.Module, validation: DataLoader, test_set: DataLoader
) -> None:
    bnn = bayesify.convert(trained, TestTimeAugmentation(flip=False, rotate=90.0))
    before = bnn.evaluate(test_set).nll
    chosen = bnn.calibrate(validation)
    assert bnn.noise == chosen.noise < 1
    assert bnn.evaluate(test_set).nll < before


def test_settings() -> None:
    method = TestTimeAugmentation(rotate=3.0, flip=False)
    settings = json.loads(json.dumps(method.to_dict()))
    assert make_method("test-time-augmentation", settings) == method
    for wrong in ({"shift": -1.0}, {"rotate": float("inf")}, {"zoom": float("nan")}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            TestTimeAugmentation(**wrong)
    with pytest.raises(SettingError, match="nothing random"):
        TestTimeAugmentation(flip=False, shift=0.0, rotate=0.0, zoom=0.0)
