"""Shifts against independent implementations, and sweeps over them."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import ABNN, DataError, SettingError, convert
from bayesify.evaluation.shifts import SHIFTS, shift, sweep

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]


@pytest.fixture
def pixels() -> Tensor:
    return torch.rand(4, 3, 10, 12)


def normalised(pixels: Tensor) -> Tensor:
    shape = (1, 3, 1, 1)
    return (pixels - torch.tensor(MEAN).view(shape)) / torch.tensor(STD).view(shape)


@pytest.mark.parametrize("kind", SHIFTS)
def test_units_do_not_matter(kind: str, pixels: Tensor) -> None:
    severity = SHIFTS[kind].severities[2]
    expected = normalised(shift(pixels, kind, severity, seed=3))
    found = shift(normalised(pixels), kind, severity, normalisation=(MEAN, STD), seed=3)
    # Where 1 / 255 is rounded, the last bit may decide.
    assert torch.allclose(found, expected, atol=0.05 if kind == "jpeg" else 1e-5)
    assert not torch.allclose(shift(pixels, kind, severity), pixels, atol=0.01)


@pytest.mark.parametrize("kind", SHIFTS)
def test_no_severity_is_the_image_and_the_original_stays(kind: str, pixels: Tensor) -> None:
    before = pixels.clone()
    assert torch.equal(shift(pixels, kind, 0.0), pixels)
    worse = [shift(pixels, kind, severity, seed=1) for severity in SHIFTS[kind].severities]
    assert torch.equal(pixels, before)
    again = shift(pixels, kind, SHIFTS[kind].severities[-1], seed=1)
    assert torch.equal(worse[-1], again)
    assert all(image.shape == pixels.shape and torch.isfinite(image).all() for image in worse)
    if kind != "gaussian":
        assert all(image.min() >= -1e-6 and image.max() <= 1 + 1e-6 for image in worse)


def test_gaussian_mix_is_equation_28(pixels: Tensor) -> None:
    noise = shift(pixels, "gaussian", 1.0, seed=5)
    for severity in (0.2, 0.7):
        expected = (1 - severity) * pixels + severity * noise
        assert torch.allclose(shift(pixels, "gaussian", severity, seed=5), expected, atol=1e-6)
    many = shift(torch.full((50, 3, 32, 32), 0.5), "gaussian", 1.0)
    error = 1 / math.sqrt(many.numel())
    assert abs(many.mean()) < 4 * error
    assert abs(many.std() - 1) < 4 * error
    assert not torch.equal(noise, shift(pixels, "gaussian", 1.0, seed=6))


def test_salt_and_pepper_hits_each_number_with_its_probability() -> None:
    grey = torch.full((50, 3, 32, 32), 0.5)
    mild, strong = (shift(grey, "salt-and-pepper", p, seed=2) for p in (0.3, 0.6))
    hit = mild != 0.5
    error = 1 / math.sqrt(grey.numel())
    assert abs(hit.double().mean() - 0.3) < 4 * error
    assert abs(mild[hit].mean() - 0.5) < 4 * error
    assert set(mild.unique().tolist()) == {0, 0.5, 1}
    assert torch.equal(strong[hit], mild[hit])  # what is hit stays hit


def test_blur_is_a_convolution(pixels: Tensor) -> None:
    sigma = 1.5
    at = torch.arange(-6.0, 7)
    kernel = torch.exp(-at.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).view(1, 1, -1)
    padded = nn.functional.pad(pixels, (6, 6, 6, 6), mode="replicate")
    rows = nn.functional.conv2d(padded.flatten(0, 1)[:, None], kernel.unsqueeze(3))
    both = nn.functional.conv2d(rows, kernel.unsqueeze(2)).reshape(pixels.shape)
    assert torch.allclose(shift(pixels, "blur", sigma), both, atol=1e-5)


def test_rotation_agrees_with_scipy_inside(pixels: Tensor) -> None:
    blurred = shift(torch.rand(2, 3, 21, 31), "blur", 1.0)
    for degrees in (10.0, 45.0, 200.0):
        expected = ndimage.rotate(
            blurred.numpy(), degrees, axes=(3, 2), reshape=False, order=1, mode="nearest"
        )
        found = shift(blurred, "rotation", degrees)
        inner = (..., slice(6, -6), slice(11, -11))  # the corners come from outside
        assert np.allclose(found.numpy()[inner], expected[inner], atol=1e-4)
    square = pixels[..., :10]
    quarter = torch.rot90(square, 1, (2, 3))
    assert torch.allclose(shift(square, "rotation", 90.0), quarter, atol=1e-5)


def test_contrast(pixels: Tensor) -> None:
    half = shift(pixels, "contrast", 0.5)
    assert torch.allclose(half.mean((1, 2, 3)), pixels.mean((1, 2, 3)), atol=1e-6)
    assert torch.allclose(half.std((1, 2, 3)), 0.5 * pixels.std((1, 2, 3)), atol=1e-6)
    assert shift(pixels, "contrast", 1.0).std((1, 2, 3)).max() < 1e-6


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_what_pillow_makes_of_it(channels: int) -> None:
    levels = torch.randint(0, 256, (2, channels, 16, 24)).byte()
    found = shift(levels.float() / 255, "jpeg", 70.0)
    for image, result in zip(levels, found, strict=True):
        packed = io.BytesIO()
        Image.fromarray(image.movedim(0, -1).squeeze(-1).numpy()).save(packed, "JPEG", quality=30)
        expected = np.asarray(Image.open(packed)).reshape(16, 24, channels)
        assert torch.equal((255 * result).round().byte().movedim(0, -1), torch.tensor(expected))
    with pytest.raises(DataError, match="1 or 3 channels, and these images have 2"):
        shift(torch.rand(1, 2, 8, 8), "jpeg", 50.0)


def test_wrong_input_is_named(pixels: Tensor) -> None:
    with pytest.raises(SettingError, match="kind='fog' must be one of gaussian, salt-and-pepper"):
        shift(pixels, "fog", 0.5)
    for severity in (-0.1, 1.1, math.nan):
        with pytest.raises(
            SettingError, match=r"of gaussian \(share of noise\) must be from 0 to 1"
        ):
            shift(pixels, "gaussian", severity)
    with pytest.raises(SettingError, match="from 0 to inf"):
        shift(pixels, "blur", math.inf)
    with pytest.raises(DataError, match="Pass normalisation="):
        shift(normalised(pixels), "blur", 1.0)
    with pytest.raises(DataError, match=r"\[batch, channels, height, width\]"):
        shift(pixels[0], "blur", 1.0)
    with pytest.raises(SettingError, match="every one of 3 channels"):
        shift(pixels, "blur", 1.0, normalisation=([0.5, 0.5], [1, 1]))
    with pytest.raises(DataError, match="NaN"):
        shift(pixels * torch.nan, "blur", 1.0)


def test_sweep_is_the_mean_at_each_severity(cnn: nn.Module) -> None:
    bnn = convert(cnn, ABNN(members=2, draws=4))
    images, target = torch.rand(10, 1, 8, 8), torch.randint(0, 4, (10,))
    found = sweep(
        bnn, DataLoader(TensorDataset(images, target), batch_size=4), "contrast", [0.0, 0.5, 1.0]
    )
    assert [point.severity for point in found] == [0, 0.5, 1]
    for point in found:
        prediction = bnn.predict(shift(images, "contrast", point.severity))
        for name in ("uncertainty", "aleatoric", "epistemic"):
            mean = getattr(prediction, name).double().mean().item()
            assert getattr(point, name) == pytest.approx(mean, abs=1e-6)
        right = (prediction.label == target).double().mean().item()
        nll = -prediction.probs.gather(1, target[:, None]).log().mean().item()
        assert point.accuracy == pytest.approx(right)
        assert point.nll == pytest.approx(nll, abs=1e-6)
        assert point.uncertainty == pytest.approx(point.aleatoric + point.epistemic, abs=1e-6)


def test_sweep_of_a_trained_network_doubts_more(
    trained: nn.Module, test_set: DataLoader, stripes: tuple[Tensor, Tensor]
) -> None:
    low, high = stripes[0].min().item(), stripes[0].max().item()
    scale = ([-low / (high - low)], [1 / (high - low)])
    bnn = convert(trained, ABNN(members=1, draws=4))
    points = sweep(bnn, test_set, "contrast", [0.0, 0.9], normalisation=scale, seed=1)
    assert points[1].uncertainty > points[0].uncertainty + 0.1
    assert points[1].accuracy < points[0].accuracy


def test_sweep_of_other_likelihoods() -> None:
    images = torch.rand(6, 1, 4, 4)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    bnn = convert(network, ABNN(members=1, draws=4), likelihood="regression")
    (point,) = sweep(bnn, [(images, torch.rand(6, 1))], "gaussian", [0.5])
    assert point.accuracy is None
    assert point.uncertainty > 0
    with pytest.raises(DataError, match="takes batches of images"):
        sweep(bnn, [(images, images, torch.rand(6, 1))], "gaussian", [0.5])
    with pytest.raises(SettingError, match="severity=2"):
        sweep(bnn, [(images, torch.rand(6, 1))], "gaussian", [2])
    with pytest.raises(DataError, match="the loader is empty"):
        sweep(bnn, [], "gaussian", [0.5])
