import math
from collections.abc import Callable

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional

import bayesify
from bayesify import (
    ABNN,
    IBNN,
    MAP,
    BayesianModel,
    Classification,
    DataError,
    NonFiniteError,
    Prediction,
    Regression,
    SettingError,
    UnsupportedNetworkError,
)
from bayesify.evaluation.attacks import _Loss, detection, fgsm, pgd

NORMALISATION = ([0.4], [0.2])


def batch(count: int = 10, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.rand(count, 1, 8, 8, generator=generator)
    return pixels, torch.randint(0, classes, (count,), generator=generator)


def normalised(pixels: Tensor) -> Tensor:
    return (pixels - 0.4) / 0.2


def losses(bnn: BayesianModel, x: Tensor, target: Tensor, draws: int | None = None) -> Tensor:
    prediction = bnn.predict(x, draws=draws)
    return bnn.likelihood.nll(prediction.averages, bnn.target_for(prediction, target))


def naive_gradient(
    bnn: BayesianModel, x: Tensor, target: Tensor, draws: int, *, together: bool = True
) -> Tensor:
    """One graph through all draws: of the mean prediction's loss, or of the draws' mean loss."""
    x = x.clone().requires_grad_()
    outputs = torch.cat(list(bnn.outputs(bayesify.batches.as_inputs(x), draws=draws)))
    target = bnn.likelihood.target(target, outputs[0])
    statistics = bnn.likelihood.statistics(outputs)
    nll = bnn.likelihood.nll(bnn.pool({n: v.mean(0) for n, v in statistics.items()}), target)
    if not together:
        nll = sum(bnn.likelihood.loss(output, target) for output in outputs) / draws
    return torch.autograd.grad(nll.sum(), x)[0]


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1))


def head(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, outputs)
    )


def tasks() -> dict[str, tuple[nn.Module, str | bayesify.Likelihood, Tensor]]:
    torch.manual_seed(5)
    labels = torch.randint(0, 3, (10,))
    labels[4] = -100
    pixels = torch.randint(0, 3, (10, 8, 8))
    pixels[:, :3] = 255
    return {
        "classes": (head(3), "classification", labels),
        "segmentation": (dense(), Classification(ignore_index=255), pixels),
        "binary": (head(1), "binary", torch.randint(0, 2, (10,))),
        "multilabel": (head(4), "multilabel", torch.randint(0, 2, (10, 4))),
        "regression": (head(2), "regression", torch.randn(10, 2)),
        "heteroscedastic": (head(2), Regression(heteroscedastic=True), torch.randn(10, 1)),
    }


def test_linear_network_by_hand() -> None:
    network = nn.Linear(3, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, -2.0, 0.0], [0.0, 1.0, 0.0]]))
    x = torch.tensor([[0.5, 0.02, 0.5], [0.05, 0.5, 0.9]])
    # The loss of class 0 falls along w0 - w1 = (1, -3, 0), that of class 1 rises.
    expected = torch.tensor([[0.4, 0.12, 0.5], [0.15, 0.4, 0.9]])
    target = torch.tensor([0, 1])
    for attacked in (
        fgsm(network, x, target, radius=0.1),
        pgd(network, x, target, radius=0.1),
        pgd(network, x, target, radius=0.1, step=0.03, steps=4),
    ):
        torch.testing.assert_close(attacked, expected)
    one = pgd(network, x, target, radius=0.1, step=0.03, steps=1)
    torch.testing.assert_close(one - x, (expected - x) * 0.3)
    at_the_edge = pgd(network, torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0]), radius=0.5)
    assert torch.equal(at_the_edge, torch.tensor([[0.0, 1.0, 0.0]]))


def test_default_step_is_two_and_a_half_radii_over_all(cnn: nn.Module) -> None:
    x, target = batch()
    default = pgd(cnn, x, target, radius=0.1, steps=5)
    assert torch.equal(pgd(cnn, x, target, radius=0.1, steps=5, step=0.05), default)
    assert not torch.equal(pgd(cnn, x, target, radius=0.1, steps=5, step=0.04), default)


@pytest.mark.parametrize("random_start", [False, True])
def test_images_stay_within_radius_and_range(cnn: nn.Module, random_start: bool) -> None:
    pixels, target = batch()
    pixels[0], pixels[1] = 0, 1
    bnn = bayesify.convert(cnn, ABNN(draws=3))
    attacked = pgd(
        bnn, normalised(pixels), target, radius=0.05, normalisation=NORMALISATION, steps=5,
        random_start=random_start,
    )  # fmt: skip
    after = attacked * 0.2 + 0.4
    change = (after - pixels).abs()
    assert change.max() == pytest.approx(0.05, abs=1e-6)
    assert after.min() > -1e-6
    assert after.max() < 1 + 1e-6
    assert (after[0] > 0.04).any()
    assert (after[1] < 0.96).any()


def test_normalisation_is_only_a_change_of_units(cnn: nn.Module) -> None:
    class Normalising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = cnn

        def forward(self, x: Tensor) -> Tensor:
            return self.network((x - 0.4) / 0.2)

    pixels, target = batch()
    outside = pgd(cnn, normalised(pixels), target, normalisation=NORMALISATION, steps=3)
    inside = pgd(Normalising(), pixels, target, steps=3)
    torch.testing.assert_close(outside * 0.2 + 0.4, inside)
    scalar = pgd(cnn, normalised(pixels), target, normalisation=(0.4, 0.2), steps=3)  # type: ignore[arg-type]
    assert torch.equal(scalar, outside)


@pytest.mark.parametrize("kind", tasks())
def test_loss_of_the_prediction_rises(kind: str) -> None:
    network, likelihood, target = tasks()[kind]
    bnn = bayesify.convert(network, ABNN(noise=0.2, draws=6), likelihood=likelihood)
    x = batch()[0]
    before = losses(bnn, x, target)
    once = losses(bnn, fgsm(bnn, x, target, radius=0.1), target)
    after = losses(bnn, pgd(bnn, x, target, radius=0.1), target)
    ignored = before == 0  # only void
    assert (after > before)[~ignored].all()
    assert after.mean() >= once.mean() > before.mean()
    assert (after == before)[ignored].all()


@pytest.mark.parametrize("strategy", ["looped", "vectorised"])
@pytest.mark.parametrize(("temperature", "slope"), [(1.0, 0.0), (0.7, 0.0), (1.0, -0.4)])
@pytest.mark.parametrize("kind", tasks())
def test_gradient_equals_that_of_one_graph_through_all_draws(
    kind: str, temperature: float, slope: float, strategy: str
) -> None:
    network, likelihood, target = tasks()[kind]
    bnn = bayesify.convert(network, ABNN(noise=0.3, draws=6), likelihood=likelihood)
    bnn.temperature, bnn.slope, bnn.strategy = temperature, slope, strategy
    x = batch()[0]
    for draws in (6, 3):
        loss = _Loss(bnn, x[:1], draws, 0)
        expected = naive_gradient(bnn, x, target, draws)
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(loss.gradient(x, loss.check_target(target, len(x))), expected)
        apart = naive_gradient(bnn, x, target, draws, together=False)
        assert not torch.allclose(expected, apart, atol=1e-5)


def test_images_equal_those_of_a_naive_attack(cnn: nn.Module) -> None:
    x, target = batch()
    bnn = bayesify.convert(cnn, ABNN(noise=0.2, draws=6))
    low, high = (x - 0.05).clamp(0, 1), (x + 0.05).clamp(0, 1)
    expected = x
    for _ in range(4):
        step = 0.02 * naive_gradient(bnn, expected, target, 6).sign()
        expected = (expected + step).clamp(low, high)
    attacked = pgd(bnn, x, target, radius=0.05, step=0.02, steps=4)
    # A sum in another order may turn the sign of what is almost 0.
    assert ((attacked - expected).abs() > 1e-6).float().mean() < 1e-3


def test_gradient_does_not_vanish_with_the_probability() -> None:
    network = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[400.0, 0.0], [0.0, 400.0]]))
    x = torch.tensor([[0.1, 0.9]])
    wrong = torch.tensor([0])
    assert functional.softmax(network(x), 1)[0, 0] == 0
    attacked = fgsm(network, x, wrong, radius=0.05)
    torch.testing.assert_close(attacked, torch.tensor([[0.05, 0.95]]))


@pytest.mark.parametrize("kind", ["classes", "multilabel"])
def test_graphs_of_draws_do_not_pile_up(kind: str) -> None:
    network, likelihood, target = tasks()[kind]
    bnn = bayesify.convert(network, ABNN(draws=12), likelihood=likelihood)
    bnn.strategy = "looped"
    x = batch()[0]
    alive, most = 0, 0

    def pack(tensor: Tensor) -> "Held":
        return Held(tensor)

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal alive, most
            self.tensor = tensor
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    peaks = []
    for draws in (3, 12):
        loss = _Loss(bnn, x[:1], draws, 0)
        most = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            loss.gradient(x, loss.check_target(target, len(x)))
        peaks.append(most)
    assert peaks[0] == peaks[1] > 0


def test_deterministic_and_no_global_randomness(cnn: nn.Module) -> None:
    x, target = batch()
    bnn = bayesify.convert(cnn, ABNN(noise=0.2, draws=3))
    state = torch.get_rng_state()
    first = pgd(bnn, x, target, random_start=True, steps=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(pgd(bnn, x, target, random_start=True, steps=3), first)
    assert not torch.equal(pgd(bnn, x, target, random_start=True, steps=3, seed=1), first)
    assert not torch.equal(pgd(bnn, x, target, steps=3), first)


@pytest.mark.parametrize("random_start", [False, True])
def test_batch_size_does_not_matter(cnn: nn.Module, random_start: bool) -> None:
    x, target = batch(9)
    bnn = bayesify.convert(cnn, ABNN(noise=0.2, draws=3))
    bnn.strategy = "looped"
    whole = pgd(bnn, x, target, steps=4, random_start=random_start)
    for size in (1, 4, 9, 100):
        parts = pgd(bnn, x, target, steps=4, random_start=random_start, batch_size=size)
        assert ((whole - parts).abs() > 1e-6).float().mean() < 0.01


@pytest.mark.parametrize("training", [False, True])
def test_plain_network_is_untouched(
    cnn: nn.Module, untouched: Callable[..., object], training: bool
) -> None:
    x, target = batch()
    cnn.train(training)
    cnn[0].weight.grad = torch.ones_like(cnn[0].weight)
    with untouched(cnn):
        attacked = pgd(cnn, x, target, steps=3)
    assert torch.equal(cnn[0].weight.grad, torch.ones_like(cnn[0].weight))
    assert not attacked.requires_grad
    assert attacked is not x
    # It is attacked as it predicts, in eval mode, in which the examples do not see each other.
    expected = pgd(cnn.eval(), x[:2], target[:2], steps=3, batch_size=10)
    assert ((attacked[:2] - expected).abs() > 1e-6).float().mean() < 0.01


def test_no_parameter_gets_a_gradient(cnn: nn.Module) -> None:
    x, target = batch()
    for bnn in (bayesify.convert(cnn, ABNN(draws=3)), bayesify.convert(cnn, IBNN(draws=4))):
        pgd(bnn, x, target, steps=1)
        assert len(list(bnn.parameters())) > 0
        assert all(p.grad is None and p.requires_grad for p in bnn.parameters())
    x.requires_grad_()
    assert not pgd(bnn, x, target, steps=1).requires_grad
    assert x.grad is None


def test_without_gradients_around(cnn: nn.Module) -> None:
    x, target = batch()
    bnn = bayesify.convert(cnn, ABNN(draws=3))
    expected = pgd(bnn, x, target, steps=2)
    with torch.no_grad():
        assert torch.equal(pgd(bnn, x, target, steps=2), expected)
    with torch.inference_mode():
        assert torch.equal(pgd(bnn, x.clone(), target.clone(), steps=2), expected)


def test_transfer_from_a_plain_network(trained: nn.Module, stripes: tuple[Tensor, Tensor]) -> None:
    x, target = stripes[0][450:], stripes[1][450:]
    low, high = x.min().item(), x.max().item()
    normalisation = ([-low / (high - low)], [1 / (high - low)])
    bnn = bayesify.convert(trained, ABNN(noise=0.3, draws=9), where="*")
    clean = losses(bnn, x, target).mean()
    settings = {"radius": 0.02, "normalisation": normalisation, "steps": 10}
    transferred = losses(bnn, pgd(trained, x, target, **settings), target).mean()
    direct = losses(bnn, pgd(bnn, x, target, **settings), target).mean()
    assert clean < transferred < direct
    assert torch.equal(
        pgd(trained, x, target, **settings),
        pgd(bayesify.convert(trained, MAP()), x, target, draws=5, **settings),
    )


def test_half_precision_images(cnn: nn.Module) -> None:
    pixels, target = batch()
    bnn = bayesify.convert(cnn, ABNN(draws=3)).to(torch.bfloat16)
    x = normalised(pixels).bfloat16()
    attacked = pgd(bnn, x, target, normalisation=NORMALISATION, radius=0.1, steps=4)
    assert attacked.dtype == torch.bfloat16
    assert ((attacked - x).float() * 0.2).abs().max() < 0.1 + 0.01
    assert losses(bnn, attacked, target).mean() > losses(bnn, x, target).mean()


def test_detection_is_average_precision_of_attacked(cnn: nn.Module) -> None:
    x, target = batch(40)
    bnn = bayesify.convert(cnn, ABNN(noise=0.3, draws=9))
    normal, strange = bnn.predict(x), bnn.predict(pgd(bnn, x, target, steps=3))
    flags = [0] * 40 + [1] * 40
    for score, sign in (("epistemic", 1), ("uncertainty", 1), ("confidence", -1)):
        values = sign * torch.cat([getattr(p, score) for p in (normal, strange)])
        found = detection(normal, strange, score)
        assert found["aupr"] == pytest.approx(average_precision_score(flags, values), abs=1e-6)
        assert set(found) >= {"auroc", "aupr", "fpr95"}
    assert detection(normal, strange) == detection(normal, strange, "epistemic")


def test_detection_counts_images_not_pixels() -> None:
    low, high = torch.full((3, 2, 4, 4), 0.5), torch.full((5, 2, 4, 4), 0.5)
    low[:, 0], low[:, 1] = 0.9, 0.1
    low[:, :, 0, 0] = 0.5  # one pixel as uncertain as any
    normal, strange = (
        Prediction("classes", {"probs": p, "aleatoric": torch.zeros(len(p), 4, 4)})
        for p in (low, high)
    )
    found = detection(normal, strange)
    assert (found["auroc"], found["aupr"], found["fpr95"]) == (1, 1, 0)
    with pytest.raises(DataError, match="examples of both kinds"):
        detection(normal, strange[:0])
    with pytest.raises(SettingError, match="score='entropic' must be one of"):
        detection(normal, strange, "entropic")
    other = Prediction("labels", strange.averages)
    with pytest.raises(DataError, match="classes and strange of labels"):
        detection(normal, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"radius": 0.0}, "radius=0.0 must be above 0"),
        ({"radius": -0.1}, "radius=-0.1 must be above 0"),
        ({"radius": 8}, "radius=8 .* radius=8/255"),
        ({"radius": math.nan}, "radius=nan"),
        ({"steps": 0}, "steps=0 must be a whole number"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"step": 0.0}, "step=0.0 must be above 0"),
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"draws": 4}, "draws=4 is not a multiple of the 3 members"),
        ({"normalisation": ([0.5], [0.0])}, "std above 0"),
        ({"normalisation": ([0.5, 0.5], [0.2, 0.2])}, "every one of 1 channels"),
        ({"normalisation": ([0.5],)}, "must be .mean, std."),
    ],
)
def test_wrong_settings(cnn: nn.Module, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        pgd(bayesify.convert(cnn), *batch(), **settings)


def test_wrong_images(cnn: nn.Module) -> None:
    x, target = batch()
    with pytest.raises(DataError, match=r"without normalisation.*-2.00.*Pass normalisation="):
        pgd(cnn, normalised(x).clamp_min(-2).index_fill(0, torch.tensor([0]), -2), target)
    with pytest.raises(DataError, match="by this normalisation these images run from"):
        pgd(cnn, normalised(x), target, normalisation=([0.4], [0.5]))
    with pytest.raises(DataError, match="by this normalisation"):
        pgd(cnn, x, target, normalisation=([math.nan], [1.0]))
    bad = x.clone()
    bad[3, 0, 2, 2] = torch.nan
    with pytest.raises(DataError, match="NaN or infinite numbers in 1 of 10 .* position 3"):
        pgd(cnn, bad, target)
    with pytest.raises(DataError, match="uint8.*255"):
        pgd(cnn, (255 * x).byte(), target)
    with pytest.raises(DataError, match="and are list"):
        pgd(cnn, x.tolist(), target)
    with pytest.raises(DataError, match="empty"):
        pgd(cnn, x[:0], target[:0])
    with pytest.raises(DataError, match="cannot run on inputs"):
        pgd(cnn, x[:, :, 0], target)


def test_wrong_targets(cnn: nn.Module) -> None:
    x, target = batch()
    with pytest.raises(DataError, match=r"shape \[9\] where \[10\]"):
        pgd(cnn, x, target[:9])
    target[9] = 4  # found before anything is attacked, though it is in the last batch
    with pytest.raises(DataError, match="4 classes"):
        pgd(cnn, x, target, batch_size=1)
    values = bayesify.convert(head(1), likelihood="regression")
    with pytest.raises(DataError, match="targets hold NaN"):
        pgd(values, x, torch.full((10, 1), torch.nan))


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.detach().flatten(1)[:, :2]


class Breaking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (x.sum() > 1e9)


def test_networks_that_cannot_be_attacked() -> None:
    x = torch.rand(4, 2)
    with pytest.raises(UnsupportedNetworkError, match="Rounding has no gradient for its input"):
        pgd(Rounding(), x, torch.zeros(4))
    values = bayesify.convert(Rounding(), MAP(), likelihood="regression")
    with pytest.raises(UnsupportedNetworkError, match="Craft the attack on another network"):
        pgd(values, x, torch.zeros(4, 2))
    with pytest.raises(NonFiniteError, match="NaN"):
        pgd(Breaking(2, 2), x, torch.zeros(4))
