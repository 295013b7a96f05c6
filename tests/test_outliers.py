import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bayesify import DataError, SettingError
from bayesify.batches import Inputs, as_inputs
from bayesify.outliers import MOST_EXAMPLES, Outliers

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def pixels(x: Tensor) -> Tensor:
    return x * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


def normalised(count: int = 10) -> Tensor:
    raw = torch.rand(count, 3, 5, 5).round(decimals=1)  # with zeros and ones among them
    return (raw - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def image(inputs: Inputs) -> Tensor:
    return inputs.args[0]


@given(radius=st.floats(0.001, 2), seed=st.integers(0, 2**40))
def test_noise_stays_within_its_radius_and_within_pixels(radius: float, seed: int) -> None:
    x = normalised()
    noisy = image(Outliers(radius, None, (MEAN, STD)).batch(as_inputs(x), seed))
    moved = pixels(noisy)
    assert moved.min() >= -1e-6
    assert moved.max() <= 1 + 1e-6
    assert (moved - pixels(x[:5])).abs().max() <= radius + 1e-6


def test_noise_is_uniform() -> None:
    x = torch.full((200, 1, 10, 10), 0.5)
    noise = image(Outliers(0.2, None, None).batch(as_inputs(x), 0)) - 0.5
    count = noise.numel()
    assert noise.min() < -0.199
    assert noise.max() > 0.199
    assert noise.mean().abs() < 5 * 0.2 / math.sqrt(3 * count)
    assert (noise.std() - 0.2 / math.sqrt(3)).abs() < 0.001
    assert (noise.flatten(1).std(0) > 0).all(), "every image has noise of its own"


def steepness(inputs: Inputs) -> Tensor:
    """A loss that grows with even columns and falls with odd ones."""
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    return (image(inputs) * signs).flatten(1).sum(1)


def test_noise_is_turned_against_the_network() -> None:
    """By 0, 1, 2 or 3 steps, whose length is such that each reaches the edge of the radius."""
    x = normalised()
    outliers = Outliers(0.05, None, (MEAN, STD), steps=3)
    low, high = (pixels(x[:5]) - 0.05).clamp(0, 1), (pixels(x[:5]) + 0.05).clamp(0, 1)
    worst = torch.where(torch.arange(5) % 2 == 0, high, low)
    as_bad_as_can_be = []
    for seed in range(20):
        noise = pixels(image(outliers.batch(as_inputs(x), seed)))
        noisy = pixels(image(outliers.batch(as_inputs(x), seed, steepness)))
        bad = torch.allclose(noisy, worst, atol=1e-5)
        assert bad or torch.equal(noisy, noise)
        as_bad_as_can_be.append(bad)
    assert 10 <= sum(as_bad_as_can_be) < 20


def test_the_users_inputs_are_not_turned_against_the_network() -> None:
    given = [torch.full((4, 3, 5, 5), 9.0)]
    outliers = Outliers(0.05, given, (MEAN, STD), steps=1)
    for seed in range(4):
        both = image(outliers.batch(as_inputs(normalised(12)), seed, steepness))
        assert (both[3:] == 9).all()


def test_one_number_normalises_all_channels() -> None:
    x = torch.full((4, 3, 2, 2), 1.0)  # the whitest pixel, under mean 0.5 and std 0.5
    noisy = image(Outliers(0.1, None, ([0.5], [0.5])).batch(as_inputs(x), 0))
    assert noisy.shape == (2, 3, 2, 2)
    assert (1 - noisy).min() >= 0
    assert (1 - noisy).max() <= 0.1 / 0.5 + 1e-6


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (5, 3), (10, 5)])
def test_half_as_many_as_training_inputs(size: int, count: int) -> None:
    given = [torch.zeros(4, 3, 5, 5)]
    for outliers in (
        Outliers(0.1, None, (MEAN, STD)),
        Outliers(0.0, given, None),
        Outliers(0.1, given, (MEAN, STD)),
    ):
        assert len(outliers.batch(as_inputs(normalised(size)), 0)) == count


@pytest.mark.parametrize(
    "loader",
    [
        [torch.full((4, 3, 5, 5), 7.0), torch.full((2, 3, 5, 5), 7.0)],
        [(torch.full((6, 3, 5, 5), 7.0), torch.zeros(6))],
        DataLoader(TensorDataset(torch.full((6, 3, 5, 5), 7.0), torch.zeros(6)), batch_size=4),
        [{"pixel_values": torch.full((6, 3, 5, 5), 7.0), "labels": torch.zeros(6)}],
    ],
    ids=["tensors", "pairs", "loader", "dicts"],
)
def test_inputs_of_the_users(loader: Iterable[object]) -> None:
    outliers = Outliers(0.0, loader, None)
    outliers.check(as_inputs(normalised()))
    assert (image(outliers.batch(as_inputs(normalised()), 0)) == 7).all()


def test_the_users_inputs_are_drawn_anew_and_lightly_augmented() -> None:
    given = torch.arange(6.0).view(6, 1, 1, 1) * 100 + torch.arange(64.0).view(1, 1, 8, 8)
    outliers = Outliers(0.0, [given], None)
    x = as_inputs(torch.zeros(12, 1, 8, 8))
    first, second = image(outliers.batch(x, 0)), image(outliers.batch(x, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, image(outliers.batch(x, 0))), "the seed alone decides"
    assert not any(torch.equal(one, original) for one in first for original in given)
    for one in first:  # shifted and mirrored, but pixels of one image still
        assert len({value // 100 for value in one.flatten().tolist()}) == 1


def test_vectors_are_not_augmented() -> None:
    given = torch.randn(5, 7)
    drawn = image(Outliers(0.0, [given], None).batch(as_inputs(torch.zeros(8, 7)), 0))
    assert all(any(torch.equal(one, row) for row in given) for one in drawn)


def test_half_of_each() -> None:
    x = normalised(12)
    both = image(
        Outliers(0.05, [torch.full((4, 3, 5, 5), 9.0)], (MEAN, STD)).batch(as_inputs(x), 0)
    )
    assert len(both) == 6
    assert (pixels(both[:3]) - pixels(x[:3])).abs().max() <= 0.05 + 1e-6
    assert not torch.equal(both[:3], x[:3])
    assert (both[3:] == 9).all()


def test_other_arguments_stay() -> None:
    inputs = Inputs((torch.rand(4, 1, 5, 5), torch.arange(4)), {"flag": True})
    drawn = Outliers(0.1, None, None).batch(inputs, 0)
    assert torch.equal(drawn.args[1], torch.arange(2))
    assert drawn.kwargs == {"flag": True}
    assert not torch.equal(drawn.args[0], inputs.args[0][:2])


def test_the_users_random_numbers_are_left_alone() -> None:
    x = normalised()
    outliers = Outliers(0.1, [x], (MEAN, STD))
    state = torch.get_rng_state()
    outliers.batch(as_inputs(x), 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_long_loader_is_read_only_so_far() -> None:
    read = []

    def endless() -> Iterable[Tensor]:
        while True:
            read.append(1)
            yield torch.zeros(1000, 2)

    assert len(Outliers(0.0, endless(), None).given) == MOST_EXAMPLES
    assert len(read) == 5


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([], "empty"),
        ([torch.full((2, 3, 5, 5), math.nan)], "NaN or infinite"),
        ([torch.full((2, 3, 5, 5), math.inf)], "NaN or infinite"),
        (["text"], "not understood"),
        ([torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 4, 4)], r"\[3, 5, 5\] and \[3, 4, 4\]"),
    ],
)
def test_loaders_that_cannot_be_used(given: list[object], match: str) -> None:
    with pytest.raises(DataError, match=match):
        Outliers(0.0, given, None)


def test_inputs_without_numbers() -> None:
    words = as_inputs({"input_ids": torch.randint(0, 9, (4, 7))})
    with pytest.raises(SettingError, match="one tensor of real numbers"):
        Outliers(0.1, None, None).check(words)
    with pytest.raises(SettingError, match="one tensor of real numbers"):
        Outliers(0.0, [{"input_ids": torch.randint(0, 9, (4, 7))}], None)


def test_other_shapes_than_the_training_data() -> None:
    outliers = Outliers(0.0, [torch.zeros(2, 3, 6, 6)], None)
    with pytest.raises(DataError, match=r"\[3, 6, 6\].*\[3, 5, 5\].*Resize"):
        outliers.check(as_inputs(normalised()))


def test_normalised_inputs_need_their_normalisation() -> None:
    x = as_inputs(normalised())
    with pytest.raises(SettingError, match=r"pixel units.*normalisation=\(mean, std\)"):
        Outliers(0.1, None, None).check(x)
    Outliers(0.1, None, (MEAN, STD)).check(x)
    Outliers(0.0, [torch.zeros(2, 3, 5, 5)], None).check(x)  # nothing in pixel units here


@pytest.mark.parametrize(
    ("normalisation", "match"),
    [
        (([0.5, 0.5], [0.2, 0.2]), "3 channels"),
        ((MEAN, [0.2, 0.2]), "3 channels"),
        ((MEAN, [0.2, 0.0, 0.2]), "std above 0"),
        ((MEAN, [0.2, math.nan, 0.2]), "std above 0"),
        (([125.0, 123.0, 114.0], [58.0, 57.0, 57.0]), "where 0 to 1 is expected"),
    ],
)
def test_wrong_normalisation(normalisation: tuple[list[float], list[float]], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        Outliers(0.1, None, normalisation).check(as_inputs(normalised()))
