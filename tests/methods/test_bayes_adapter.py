import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, DataError, SettingError
from bayesify.batches import Inputs, as_inputs
from bayesify.methods import bayes_adapter, make_method
from bayesify.methods.bayes_adapter import with_kl_gradients
from bayesify.outliers import Loss, Outliers
from bayesify.posterior import MeanField, fresh_normals, key
from bayesify.sites import find_parameters, named_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:training did not help"),
    pytest.mark.filterwarnings("ignore:.*performance drop"),  # torch, of kernels under vmap
]

# By these numbers the pixels of `stripes`, from -6 to 6, lie between 0 and 1.
NORMALISATION = ([0.5], [0.08])
STRANGE = [6 * torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(7)) - 3]


@pytest.fixture
def batch(stripes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return stripes[0][:10], stripes[1][:10]


# The gradients of the KL

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def small_posterior() -> MeanField:
    network = nn.Linear(3, 2)
    with torch.no_grad():
        network.weight.copy_(torch.linspace(-1, 1, 6).view(2, 3))
        network.bias.fill_(0.3)
    network.double()
    sites = find_parameters(network)[0]
    log_std = {site.name: (-2.0, -1.0) for site in sites}
    return MeanField(sites, named_tensors(network), log_std, 1.0)


def train(
    optimizer: torch.optim.Optimizer,
    posterior: MeanField,
    penalty: Callable[[], Tensor] | None,
    parts: int = 1,
    scaler: torch.amp.GradScaler | None = None,
) -> list[Tensor]:
    """Three steps on some loss, in so many backward passes each."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(parts):
            drawn = posterior.draws(step, [0])
            loss = sum(value.square().sum() for value in drawn.values())
            scaler.scale(loss / parts).backward()
        if penalty is not None:
            scaler.scale(penalty()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in posterior.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["plain", "accumulated", "scaled"])
def test_kl_gradients_are_autograds(name: str, how: str) -> None:
    """Once a step, whatever the optimizer, however many backward passes, and after unscaling."""
    examples, prior_std = 40, 0.7
    weight_decay = 1 / (prior_std**2 * examples)
    mine, theirs = small_posterior(), small_posterior()
    optimizer = OPTIMIZERS[name](mine.parameters())
    with_kl_gradients(optimizer, mine, weight_decay, examples)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how == "scaled" else None
    found = train(optimizer, mine, None, 3 if how == "accumulated" else 1, scaler)
    expected = train(
        OPTIMIZERS[name](theirs.parameters()), theirs, lambda: theirs.kl(prior_std) / examples
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_kl_gradients_are_the_papers() -> None:
    """lambda mu, and lambda exp(2 psi) - 1/n, which the tests above would not see vanish."""
    posterior = small_posterior()
    before = [parameter.detach().clone() for parameter in posterior.parameters()]
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1.0)
    with_kl_gradients(optimizer, posterior, 0.25, 8)
    for parameter in posterior.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    mu, psi = before[:2], before[2:]
    for parameter, old in zip(posterior.mean.parameters(), mu, strict=True):
        torch.testing.assert_close(old - parameter, 0.25 * old)
    for parameter, old in zip(posterior.log_std.parameters(), psi, strict=True):
        torch.testing.assert_close(old - parameter, 0.25 * (2 * old).exp() - 1 / 8)


def test_fit_adds_the_kl_once_a_step(
    trained: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rates of 0 for the loss's gradient, what is left is the KL's."""
    bnn = bayesify.convert(trained, BayesAdapter(weight_decay=0.5, adapt_statistics=False))
    seen = []

    def watch(_self: BayesAdapter, posterior: MeanField, examples: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.0)
        loss: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_: loss.extend(p.grad.clone() for p in posterior.parameters())
        )
        with_kl_gradients(optimizer, posterior, 0.5, examples)
        optimizer.register_step_pre_hook(
            lambda *_: seen.extend(
                p.grad - g for p, g in zip(posterior.parameters(), loss, strict=True)
            )
        )
        return optimizer

    monkeypatch.setattr(BayesAdapter, "optimizer", watch)
    bnn.fit(
        [batch],
        validation=[batch],
        epochs=1,
        progress=False,
        accumulate=4,
        num_examples=10,
        precision="bf16",
    )
    posterior = bnn.posterior
    expected = [0.5 * value for _, value in posterior.mean.items()]
    expected += [0.5 * (2 * value).exp() - 1 / 10 for _, value in posterior.log_std.items()]
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# Draws of a training batch


def loop(
    network: nn.Module, bnn: bayesify.BayesianModel, x: Tensor, y: Tensor, draws: int
) -> dict[str, Tensor]:
    """Gradients of the first step of seed 0, by running the network on one example at a time."""
    posterior = bnn.posterior
    noise = fresh_normals(posterior.shapes(), seed=key("round", key("step", 0, 0), 0), count=draws)
    total = torch.zeros(())
    for i in range(len(x)):
        own = {name: value[[i * draws // len(x)]] for name, value in noise.items()}
        draw = {name: value[0] for name, value in posterior(torch.zeros(1).long(), own).items()}
        output = functional_call(network, draw, (x[i : i + 1],))
        total = total + nn.functional.cross_entropy(output, y[i : i + 1]) / len(x)
    names, parameters = zip(*posterior.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


@pytest.mark.parametrize(("groups", "draws"), [(None, 10), (5, 5), (2, 2), (1, 1)])
def test_gradients_are_those_of_a_loop(
    trained: nn.Module,
    batch: tuple[Tensor, Tensor],
    gradients: list[dict[int, Tensor]],
    groups: int | None,
    draws: int,
) -> None:
    """Every example has a draw of its own, or its group has."""
    x, y = batch
    method = BayesAdapter(log_std=(-2.0, -2.0), lr=0.0, psi_lr=0.0, adapt_statistics=False)
    bnn = bayesify.convert(trained, method)
    expected = loop(trained, bnn, x, y, draws)
    bnn.fit([batch], validation=[batch], epochs=1, progress=False, groups=groups)
    assert len(gradients) == 1
    for name, parameter in bnn.posterior.named_parameters():
        torch.testing.assert_close(
            gradients[0][id(parameter)], expected[name], atol=1e-5, rtol=1e-4
        )


def test_the_choice_is_made_by_size_and_said(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = BayesAdapter(draws=2, adapt_statistics=False)
    assert method.groups(1_000_000) is None
    assert method.groups(1_000_001) == 4

    def fit(**settings: object) -> bayesify.fit_result.FitResult:
        bnn = bayesify.convert(trained, method)
        return bnn.fit(loader, validation=validation, progress=False, **settings)

    small = fit()
    assert small.groups is None
    assert "(a draw for each example)" in str(small)
    one = fit(groups=1)
    assert one.groups == 1
    assert "(one draw a batch)" in str(one)
    monkeypatch.setattr(bayes_adapter, "LARGE", 100)
    large = fit()
    assert large.groups == 4
    assert "(4 draws a batch)" in str(large)


def test_where_leaves_the_other_weights_alone(trained: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(trained, BayesAdapter(log_std=(-1.0, -1.0)), where="8.*")
    assert {site.name for site in bnn.sites} == {"8.weight", "8.bias"}
    sample = bnn.sample()
    for name, parameter in trained.named_parameters():
        assert torch.equal(sample.get_parameter(name), parameter) == (not name.startswith("8."))
    bnn.noise = 0.0
    assert torch.equal(bnn.sample()(images), trained(images))


def test_a_network_without_normalisation_layers_learns() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 6)
    y = (x[:, 0] > 0).long()
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    bnn = bayesify.convert(network, BayesAdapter(lr=0.1))
    batches = list(zip(x.split(20), y.split(20), strict=True))
    result = bnn.fit(batches, validation=batches, epochs=3, progress=False)
    assert result.nll < 0.7 * result.network_nll


def test_rates() -> None:
    method = BayesAdapter()
    assert method.rates(0.0) == [1.0, 1.0]
    psi = [method.rates(progress)[1] for progress in (0.24, 0.26, 0.51, 0.76, 0.99)]
    assert psi == pytest.approx([1, 0.2, 0.04, 0.008, 0.008])
    assert method.rates(0.5)[0] == pytest.approx(0.5)


def test_means_and_psi_train_at_rates_of_their_own(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    def moved(**settings: float) -> tuple[bool, bool]:
        bnn = bayesify.convert(trained, BayesAdapter(draws=4, **settings))
        before = {name: value.clone() for name, value in bnn.posterior.named_parameters()}
        bnn.fit(loader, validation=validation, progress=False, keep="last")
        kinds = {"mean": False, "log_std": False}
        for name, value in bnn.posterior.named_parameters():
            kinds[name.split(".")[0]] |= not torch.equal(value, before[name])
        return kinds["mean"], kinds["log_std"]

    assert moved(lr=0.01, psi_lr=0.0) == (True, False)
    assert moved(lr=0.0, psi_lr=0.1) == (False, True)


@pytest.mark.parametrize("method", [BayesAdapter, IBNN])
def test_the_rate_follows_the_size_of_the_weights(
    method: type[BayesAdapter | IBNN], trained: nn.Module
) -> None:
    def rate(network: nn.Module, lr: float | None = None) -> float:
        chosen = method(lr=lr)
        optimizer = chosen.optimizer(bayesify.convert(network, chosen).posterior, 100)
        found: float = optimizer.param_groups[0]["lr"]
        return found

    weights = [p.detach().flatten() for p in trained.parameters() if p.ndim > 1]
    size = torch.cat(weights).square().mean().sqrt().item()
    assert rate(trained) == pytest.approx(0.0025 * size)
    larger = copy.deepcopy(trained)
    with torch.no_grad():
        for parameter in larger.parameters():
            parameter.mul_(10)
    assert rate(larger) == pytest.approx(0.025 * size)
    assert rate(trained, 1e-5) == rate(larger, 1e-5) == 1e-5
    with torch.no_grad():
        for parameter in larger.parameters():
            parameter.zero_()
    assert rate(larger) > 0


# Outliers


def test_two_copies_never_share_a_draw(
    trained: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the groups and parts, what is compared are two draws: if not, I were 0."""
    found: list[Tensor] = []
    loss = BayesAdapter.ood_loss

    def note(self: BayesAdapter, information: Tensor) -> Tensor:
        if information.requires_grad:  # in training, not in validation
            found.append(information.detach())
        return loss(self, information)

    monkeypatch.setattr(BayesAdapter, "ood_loss", note)
    for settings in (
        {"groups": None},
        {"groups": 1},
        {"groups": 2},
        {"groups": 3},
        {"groups": 50},
        {"groups": None, "accumulate": 3},
        {"groups": 1, "accumulate": 2},
        {"groups": 3, "accumulate": 10},
    ):
        method = BayesAdapter(draws=2, log_std=(-1.0, -1.0), adapt_statistics=False)
        bnn = bayesify.convert(trained, method)
        bnn.fit([batch], validation=[batch], ood=STRANGE, epochs=1, progress=False, **settings)
        information = torch.cat(found)
        assert len(information) == 5, settings
        assert (information > 1e-5).all(), settings
        found.clear()


def test_loss_on_outliers_is_the_papers(
    trained: nn.Module, batch: tuple[Tensor, Tensor], gradients: list[dict[int, Tensor]]
) -> None:
    """weight mean(relu(margin - I)), on top of the loss on the batch itself."""
    x, y = batch
    method = BayesAdapter(
        draws=2,
        log_std=(-2.0, -2.0),
        ood_radius=0.2,
        margin=0.6,
        ood_weight=3.0,
        psi_lr=0.0,
        adapt_statistics=False,
    )
    bnn = bayesify.convert(trained, method)
    posterior, step_seed = bnn.posterior, key("step", 0, 0)
    expected = loop(trained, bnn, x, y, 10)
    strange = Outliers(0.2, None, NORMALISATION).batch(as_inputs(x), step_seed).args[0]
    assert len(strange) == 5
    noise = fresh_normals(posterior.shapes(), seed=key("outliers", step_seed), count=10)
    draws = posterior(torch.zeros(10).long(), noise)
    total = torch.zeros(())
    for i in range(5):
        outputs = [
            functional_call(trained, {n: v[place] for n, v in draws.items()}, (strange[i : i + 1],))
            for place in (i, 5 + i)
        ]
        probs = torch.stack(outputs).softmax(2)
        entropy = torch.special.entr(probs).sum(2).mean(0)
        information = torch.special.entr(probs.mean(0)).sum(1) - entropy
        total = total + 3.0 * torch.relu(0.6 - information).sum() / 5
    bnn.fit([batch], validation=[batch], progress=False, normalisation=NORMALISATION)
    names, parameters = zip(*posterior.named_parameters(), strict=True)
    doubts = torch.autograd.grad(total, parameters)
    for name, parameter, doubt in zip(names, parameters, doubts, strict=True):
        found = gradients[0][id(parameter)]
        torch.testing.assert_close(found, expected[name] + doubt, atol=2e-5, rtol=1e-3)
        assert not torch.allclose(found, expected[name], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("radius", "ood", "groups", "rises"),
    [
        (0.0, None, None, False),
        (0.4, None, None, True),
        (0.0, STRANGE, None, True),
        (0.4, STRANGE, None, True),
        (0.4, None, 1, True),
    ],
    ids=["without", "noise", "given", "both", "noise-shared-draw"],
)
def test_training_on_outliers_raises_their_information(
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    radius: float,
    ood: list[Tensor] | None,
    groups: int | None,
    rises: bool,
) -> None:
    x = validation.dataset.tensors[0]
    strange = Outliers(0.4, ood, NORMALISATION).batch(as_inputs(x), 1).args[0]
    method = BayesAdapter(
        lr=5e-3,
        psi_lr=1.0,
        log_std=(-3.5, -3.5),
        margin=0.65,
        ood_weight=5.0,
        ood_radius=radius,
        adapt_statistics=False,
        adam=False,
    )
    bnn = bayesify.convert(trained, method)
    before = bnn.predict(strange).epistemic.mean()
    bnn.fit(
        loader,
        validation=validation,
        epochs=5,
        ood=ood,
        normalisation=NORMALISATION,
        groups=groups,
        keep="last",
        temper=False,
        progress=False,
    )
    after = bnn.predict(strange).epistemic.mean()
    assert (after > 1.3 * before) == rises, (before, after)


@pytest.mark.parametrize(
    ("ood", "settings", "error", "match"),
    [
        ([], {}, DataError, "OOD loader is empty"),
        ([torch.zeros(4, 1, 9, 9)], {}, DataError, r"\[1, 9, 9\].*Resize"),
        ([torch.full((4, 1, 8, 8), math.nan)], {}, DataError, "NaN or infinite"),
        (["text"], {}, DataError, "not understood"),
        (None, {"ood_radius": 0.1}, SettingError, r"Pass normalisation=\(mean, std\)"),
    ],
)
def test_outliers_that_cannot_be_used_change_nothing(
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    ood: object,
    settings: dict[str, float],
    error: type[Exception],
    match: str,
    untouched: Callable[..., object],
    tmp_path: object,
) -> None:
    # So much noise that the network itself would win: were it judged first, the noise would be 0.
    bnn = bayesify.convert(trained, BayesAdapter(log_std=(1.0, 1.0), **settings))
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    checkpoint = tmp_path / "fit"
    with untouched(trained), pytest.raises(error, match=match):
        bnn.fit(loader, validation=validation, ood=ood, progress=False, checkpoint=checkpoint)
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
    assert (bnn.noise, bnn.temperature) == (1.0, 1.0)
    assert not checkpoint.exists()


def test_values_cannot_be_trained_on_outliers() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = bayesify.convert(network, BayesAdapter(log_std=(1.0, 1.0)), likelihood="regression")
    batch = (torch.randn(10, 4), torch.randn(10))
    with pytest.raises(SettingError, match="no mutual information"):
        bnn.fit([batch], validation=[batch], ood=[torch.randn(10, 4)], progress=False)
    assert bnn.noise == 1


def test_other_methods_do_not_take_outliers(trained: nn.Module, loader: DataLoader) -> None:
    bnn = bayesify.convert(trained, ABNN())
    with pytest.raises(SettingError, match="ABNN does not train on OOD data"):
        bnn.fit(loader, ood=STRANGE, progress=False)


def test_attacks_are_on_the_network_as_it_is(
    trained: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outliers made by gradient steps cost the network more than those made by noise."""
    seen: list[tuple[float, float]] = []
    own = Outliers.batch

    def spy(self: Outliers, inputs: Inputs, seed: int, loss: Loss | None = None) -> Inputs:
        strange = own(self, inputs, seed, loss)
        if loss is not None:
            with torch.no_grad():
                noise = loss(own(self, inputs, seed)).mean().item()
                seen.append((noise, loss(strange).mean().item()))
        return strange

    monkeypatch.setattr(Outliers, "batch", spy)
    method = BayesAdapter(draws=2, ood_radius=0.1, ood_steps=2, adapt_statistics=False)
    bnn = bayesify.convert(trained, method)
    settings = {"normalisation": NORMALISATION, "progress": False, "epochs": 8}
    bnn.fit([batch], validation=[batch], **settings)
    raised = [attack - noise for noise, attack in seen]
    assert len(raised) == 12, "a step each, the trial before the first, three judgements"
    assert all(change >= 0 for change in raised)
    assert sum(change > 0 for change in raised) >= 4, "some have no step"


def test_the_head_can_have_more_noise(trained: nn.Module) -> None:
    bnn = bayesify.convert(trained, BayesAdapter(head_log_std=(-0.5, 0.5)))
    psi = dict(bnn.posterior.log_std.items())
    wide = [name for name, value in psi.items() if value.max() > -5]
    matrices = [name for name, value in psi.items() if value.ndim > 1]
    assert wide == [matrices[-1]]
    assert psi[wide[0]].min() >= -0.5
    assert psi[wide[0]].max() <= 0.5


# Settings


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"log_std": (-5, -6)}, r"log_std=\(-5, -6\).*the smaller first"),
        ({"log_std": (-5, 100)}, "overflows"),
        ({"log_std": (-math.inf, 0)}, "two finite numbers"),
        ({"log_std": (math.nan, 0)}, "two finite numbers"),
        ({"log_std": (-6, -5, -4)}, r"log_std=\(-6, -5, -4\)"),
        ({"log_std": -5}, "log_std=-5"),
        ({"log_std": ("a", "b")}, "two finite numbers"),
        ({"lr": -1e-3}, "lr=-0.001"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"psi_lr": -0.1}, "psi_lr=-0.1"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"margin": math.nan}, "margin=nan"),
        ({"ood_weight": -1}, "ood_weight=-1"),
        ({"ood_radius": -0.1}, "ood_radius=-0.1"),
        ({"ood_steps": -1}, "ood_steps=-1 must be a whole number, 0 or more"),
        ({"ood_steps": 1.5}, "ood_steps=1.5"),
        ({"ood_steps": 3}, "Set ood_radius as well"),
        ({"head_log_std": (1, 0)}, r"head_log_std=\(1, 0\).*the smaller first"),
        ({"head_log_std": 0}, "head_log_std=0"),
        ({"draws": 0}, "draws=0"),
        ({"noise": -1}, "noise=-1"),
    ],
)
def test_bad_settings(settings: dict[str, object], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        BayesAdapter(**settings)


def test_settings_come_back_from_json() -> None:
    import json

    method = BayesAdapter(
        log_std=(-4, -3), head_log_std=(-1, 0), margin=0.5, ood_radius=0.1, ood_steps=2
    )
    again = make_method("bayes-adapter", json.loads(json.dumps(method.to_dict())))
    assert again == method


def test_statistics_follow_the_images_if_asked(
    trained: nn.Module, loader: DataLoader, untouched: Callable[..., object]
) -> None:
    moved = [(x + 3.0, y) for x, y in loader]
    with untouched(trained):
        for adapts in (False, True):
            bnn = bayesify.convert(trained, BayesAdapter(adapt_statistics=adapts, draws=4))
            result = bnn.fit(
                moved, num_examples=sum(len(y) for _, y in moved), validation=loader,
                keep="last", epochs=4, progress=False,
            )  # fmt: skip
            mean = dict(trained.named_buffers())["1.running_mean"]
            followed = dict(bnn.posterior.shared()).get("1.running_mean", mean)
            assert torch.equal(followed, mean) is not adapts
            assert ("one draw a batch" in str(result)) is adapts


def test_adam(trained: nn.Module, loader: DataLoader) -> None:
    posterior = bayesify.convert(trained, BayesAdapter()).posterior
    optimizer = BayesAdapter(adam=True, lr=1e-4, psi_lr=1e-3).optimizer(posterior, 100)
    assert isinstance(optimizer, torch.optim.Adam)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-3]
    bnn = bayesify.convert(trained, BayesAdapter(adam=True, lr=1e-3, psi_lr=1e-2, draws=4))
    before = bnn.posterior.mean["0.weight"].detach().clone()
    bnn.fit(loader, keep="last", progress=False)
    assert not torch.equal(bnn.posterior.mean["0.weight"], before)
