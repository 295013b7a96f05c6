"""Every public set that BAYESIFY_DATA holds, opened and looked at."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from bayesify.data import CIFAR10_NORMALISATION, VOID, load_data
from bayesify.zoo import load_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("BAYESIFY_DATA" not in os.environ, reason="BAYESIFY_DATA is not set"),
]

UCI = {
    "bostonHousing": (506, 13, 20),
    "concrete": (1030, 8, 20),
    "energy": (768, 8, 20),
    "kin8nm": (8192, 8, 20),
    "naval-propulsion-plant": (11934, 16, 20),
    "power-plant": (9568, 4, 20),
    "protein-tertiary-structure": (45730, 9, 5),
    "wine-quality-red": (1599, 11, 20),
    "yacht": (308, 6, 20),
}


@pytest.mark.parametrize(
    ("spec", "count", "shape", "classes"),
    [
        ("cifar10:train", 50_000, (3, 32, 32), 10),
        ("cifar10:test", 10_000, (3, 32, 32), 10),
        ("svhn", 5_000, (3, 32, 32), 10),
        ("cifar100", 5_000, (3, 32, 32), 100),
        ("textures", 1_200, (3, 32, 32), 10),
        ("fashion-mnist:train", 60_000, (1, 28, 28), 10),
        ("fashion-mnist:test", 10_000, (1, 28, 28), 10),
        ("notmnist", 10_000, (1, 28, 28), 10),
        ("faces", 400, (1, 112, 92), 40),
    ],
)
def test_images_in_memory(spec, count, shape, classes):
    data = load_data(spec)
    assert len(data) == count
    assert data.labels.unique().tolist() == list(range(classes))
    x, y = next(iter(DataLoader(data, batch_size=64)))
    assert x.shape == (64, *shape)
    assert x.min() >= 0
    assert 0.5 < x.max() <= 1
    assert y.dtype == torch.int64
    # Tiles cut at the wrong place would have an edge through the picture.
    steps = (x[..., 1:, :] - x[..., :-1, :]).abs().mean(dim=(0, 1, 3))
    assert steps.max() < 6 * steps.mean()


def test_cifar10_is_balanced_and_in_order():
    test = load_data("cifar10:test")
    assert test.labels.bincount().tolist() == [1000] * 10
    assert [test.classes[y] for y in test.labels[:4]] == ["cat", "ship", "ship", "airplane"]


@pytest.mark.parametrize("size", [None, 96])
def test_imagenet_sample(size):
    data = load_data("imagenet-sample", size=size)
    assert len(data) == 1000
    assert data.labels.tolist() == list(range(1000))
    assert data.classes[0] == "n01440764"
    x, _ = next(iter(DataLoader(data, batch_size=4)))
    assert x.shape == (4, 3, size or 224, size or 224)


@pytest.mark.parametrize(("part", "count"), [("train", 367), ("val", 101), ("test", 233)])
def test_camvid(part, count):
    data = load_data(f"camvid:{part}")
    assert len(data) == count
    assert len(data.classes) == 11
    x, y = next(iter(DataLoader(load_data(f"camvid:{part}[::40]"), batch_size=8)))
    assert x.shape[1:] == (3, 360, 480)
    assert y.shape[1:] == (360, 480)
    assert set(y.unique().tolist()) <= {*range(11), VOID}
    assert VOID in y


@pytest.mark.parametrize("name", UCI)
def test_uci(name):
    rows, columns, splits = UCI[name]
    train, test = (load_data(f"uci/{name}:{part}/{splits - 1}") for part in ("train", "test"))
    assert len(train) + len(test) == rows
    x, y = train.tensors
    assert x.shape[1] == columns
    assert x.isfinite().all()
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(columns), atol=1e-4, rtol=0)
    torch.testing.assert_close(y.std(), torch.tensor(1.0), atol=0.01, rtol=0)
    assert test.y_std == train.y_std


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ("train", 15_000),
        ("val", 3_000),
        ("test", 4_500),
        ("oos_train", 100),
        ("oos_val", 100),
        ("oos_test", 1_000),
    ],
)
def test_clinc150(part, count):
    data = load_data(f"clinc150:{part}")
    assert len(data) == count
    assert len(data.classes) == 150
    wanted = {-1} if part.startswith("oos") else set(range(150))
    assert set(data.labels) == wanted
    texts, labels = next(iter(DataLoader(data, batch_size=4)))
    assert all(isinstance(text, str) for text in texts)
    assert labels.shape == (4,)


def correct_answers(model, spec):
    loader = DataLoader(load_data(spec, normalise=CIFAR10_NORMALISATION), batch_size=250)
    with torch.inference_mode():
        return sum((model(x).argmax(dim=1) == y).sum().item() for x, y in loader)


def test_resnet20_is_as_good_as_published():
    assert correct_answers(load_model("cifar10-resnet20"), "cifar10:test") == 9260


def test_resnet56_is_as_good_as_published():
    # All 10,000 images give 9437, its 94.37 %; a fifth of them is enough to know it again.
    assert correct_answers(load_model("cifar10-resnet56"), "cifar10:test[:2000]") == 1893
