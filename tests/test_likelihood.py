import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bayesify
from bayesify import (
    Binary,
    Classification,
    DataError,
    Multilabel,
    Prediction,
    Regression,
    SettingError,
)
from bayesify.likelihood import as_likelihood, find_tensor


def averages(likelihood: bayesify.Likelihood, outputs: Tensor) -> dict[str, Tensor]:
    return {name: value.mean(0) for name, value in likelihood.statistics(outputs).items()}


def test_classification() -> None:
    likelihood = Classification()
    logits, target = torch.randn(6, 4), torch.randint(0, 4, (6,))
    expected = functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(likelihood.loss(logits, target), expected)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(likelihood.loss(logits, target, weight), expected * weight[target])
    for dtype in (torch.float64, torch.bfloat16):  # a network of another precision
        found = likelihood.loss(logits.to(dtype), target, weight.to(dtype))
        torch.testing.assert_close(found, expected * weight[target], atol=0.05, rtol=0.05)
    torch.testing.assert_close(likelihood.nll(averages(likelihood, logits[None]), target), expected)


def test_predictive_is_the_log_of_the_mean_probability() -> None:
    outputs = torch.randn(5, 3, 4)
    torch.testing.assert_close(
        Classification().predictive(outputs).exp(), outputs.softmax(2).mean(0)
    )
    torch.testing.assert_close(Multilabel().predictive(outputs).exp(), outputs.sigmoid().mean(0))


@pytest.mark.parametrize("slope", [0.0, -0.5])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_average_is_tempered(temperature: float, slope: float) -> None:
    """Mean probabilities to the power 1/T (1 + 10 H)^-slope; of yes and no as of two classes."""
    torch.manual_seed(0)
    outputs = 2 * torch.randn(5, 3, 4, 2)  # draws, examples, classes, positions
    mean = outputs.softmax(2).mean(0)
    doubt = -(mean * mean.log()).sum(1, keepdim=True)
    power = mean ** (1 / temperature / (1 + 10 * doubt) ** slope)
    expected = power / power.sum(1, keepdim=True)
    found = Classification().pool(averages(Classification(), outputs), temperature, slope)
    torch.testing.assert_close(found["probs"], expected)
    predictive = Classification().predictive(outputs, temperature, slope)
    torch.testing.assert_close(predictive, expected.log())
    two = torch.stack([torch.zeros_like(outputs), outputs], dim=2)
    two_classes = Classification().pool(averages(Classification(), two), temperature, slope)
    labels = Multilabel().pool(averages(Multilabel(), outputs), temperature, slope)
    torch.testing.assert_close(labels["probs"], two_classes["probs"][:, 1])
    torch.testing.assert_close(labels["aleatoric"], two_classes["aleatoric"])
    predictive = Multilabel().predictive(outputs, temperature, slope)
    torch.testing.assert_close(predictive.exp(), labels["probs"])


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_temperature_leaves_the_shares_of_the_doubt(temperature: float) -> None:
    torch.manual_seed(0)
    outputs = 3 * torch.randn(5, 20, 4)
    outputs[:, 0] = torch.tensor([1e3, 0, 0, 0])  # no doubt to be divided
    plain = Prediction("classes", averages(Classification(), outputs))
    tempered = Prediction("classes", Classification().pool(plain.averages, temperature))
    assert ((tempered.entropy > plain.entropy)[1:] == (temperature > 1)).all()
    share = (plain.epistemic / plain.entropy)[1:]
    assert share.min() > 0.01
    torch.testing.assert_close((tempered.epistemic / tempered.entropy)[1:], share)
    assert tempered.epistemic[0] <= tempered.entropy[0] < 1e-9


@pytest.mark.parametrize("likelihood", [Classification(), Multilabel()])
def test_gradients_are_finite_where_all_is_sure(likelihood: bayesify.Likelihood) -> None:
    outputs = torch.tensor([[[200.0, -200.0, 0.0]], [[200.0, -200.0, 1.0]]], requires_grad=True)
    likelihood.predictive(outputs, 1.2, -0.3).sum().backward()
    assert outputs.grad is not None
    assert torch.isfinite(outputs.grad).all()


def test_sure_draws_that_disagree() -> None:
    """No temperature of draws makes their average surer than votes are; one of the average does."""
    outputs = torch.tensor([[[9.0, 0.0]]] * 3 + [[[0.0, 9.0]]])
    votes = averages(Classification(), outputs)
    assert votes["probs"][0, 0] == pytest.approx(0.75, abs=1e-3)
    sharp = Classification().pool(votes, 0.5)["probs"]
    assert sharp[0, 0] == pytest.approx(0.9, abs=1e-3)


def test_dense_classification_ignores_void() -> None:
    likelihood = Classification(ignore_index=255)
    logits, target = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    target[0, :2] = 255
    target[1] = 255
    target = likelihood.target(target, logits)
    expected = functional.cross_entropy(logits[:1], target[:1], ignore_index=255)
    for loss in (
        likelihood.loss(logits, target),
        likelihood.nll(averages(likelihood, logits[None]), target),
    ):
        torch.testing.assert_close(loss, torch.tensor([expected.item(), 0.0]))


def test_binary_is_two_classes() -> None:
    likelihood = Binary()
    logit, target = torch.randn(6, 1), torch.randint(0, 2, (6,)).float()
    read = likelihood.read(logit)
    torch.testing.assert_close(read.softmax(1)[:, 1:], logit.sigmoid())
    torch.testing.assert_close(
        likelihood.loss(read, likelihood.target(target[:, None], read)),
        functional.binary_cross_entropy_with_logits(logit[:, 0], target, reduction="none"),
    )
    with pytest.raises(DataError, match="one logit"):
        likelihood.read(torch.randn(6, 2))


def test_multilabel() -> None:
    likelihood = Multilabel()
    logits, target = torch.randn(6, 3), torch.randint(0, 2, (6, 3))
    form = likelihood.target(target, logits)
    expected = functional.binary_cross_entropy_with_logits(logits, form, reduction="none").mean(1)
    torch.testing.assert_close(likelihood.loss(logits, form), expected)
    torch.testing.assert_close(likelihood.nll(averages(likelihood, logits[None]), form), expected)


def test_regression_with_learned_noise() -> None:
    likelihood = Regression()
    with torch.no_grad():
        likelihood.log_variance.fill_(math.log(0.25))
    mean, target = torch.randn(6, 2), torch.randn(6, 2)
    output = likelihood.read(mean)
    expected = -torch.distributions.Normal(mean, 0.5).log_prob(target).mean(1)
    torch.testing.assert_close(likelihood.loss(output, target), expected)
    averaged = averages(likelihood, output[None])
    torch.testing.assert_close(likelihood.nll(averaged, target).float(), expected)
    warm = likelihood.pool(averaged, 3.0)
    torch.testing.assert_close(warm["aleatoric"].float(), torch.full((6, 2), 0.25 * 9))


def test_regression_that_says_its_own_noise() -> None:
    likelihood = Regression(heteroscedastic=True)
    mean, log_variance = torch.randn(6, 2), torch.randn(6, 2)
    together = likelihood.read(torch.cat([mean, log_variance], 1))
    assert torch.equal(together, likelihood.read((mean, log_variance)))
    assert torch.equal(together[:, 0], mean)
    assert not list(likelihood.parameters())
    with pytest.raises(DataError, match="log-variance"):
        likelihood.read(torch.randn(6, 3))


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "match"),
    [
        (Classification(), torch.zeros(2, 3), torch.tensor([0, 3]), r"from 0 to 3.*3 classes"),
        (Classification(), torch.zeros(2, 3), torch.tensor([-1, 0]), "from -1 to 0"),
        (Classification(), torch.zeros(2, 3), torch.tensor([0.5, 0]), "fractions"),
        (Classification(), torch.zeros(2, 3), torch.zeros(2, 3), "not one-hot"),
        (Classification(), torch.zeros(2, 3), torch.zeros(3), r"\[3\] where \[2\]"),
        (Binary(), torch.zeros(2, 2), torch.tensor([0, 2]), "from 0 to 2"),
        (Multilabel(), torch.zeros(2, 3), torch.full((2, 3), 2), "must be 0 or 1"),
        (Multilabel(), torch.zeros(2, 3), torch.zeros(2), "for every label"),
        (Regression(), torch.zeros(2, 2, 1), torch.tensor([0.0, math.nan]), "NaN"),
        (Regression(), torch.zeros(2, 2, 1), torch.zeros(2, 2), "must agree"),
    ],
)
def test_bad_targets(
    likelihood: bayesify.Likelihood, output: Tensor, target: Tensor, match: str
) -> None:
    with pytest.raises(DataError, match=match):
        likelihood.target(target, output)


def test_a_column_of_targets_is_not_broadcast() -> None:
    target = Regression().target(torch.zeros(4, 1), torch.zeros(4, 2))
    assert target.shape == (4,)


def test_outputs_of_every_kind() -> None:
    logits = torch.zeros(2, 3)

    class Output:
        def __init__(self) -> None:
            self.logits = logits

    for output in (
        logits,
        {"logits": logits, "x": torch.ones(1)},
        {"out": logits, "aux": torch.ones(1)},
        {"only": logits},
        (logits, torch.ones(1)),
        Output(),
    ):
        assert find_tensor(output) is logits
    for unclear in ({"a": logits, "b": logits}, "text", ("a",)):
        with pytest.raises(DataError, match="which tensor"):
            find_tensor(unclear)
    chosen = Classification(output=lambda o: o["b"])
    assert chosen.read({"a": torch.ones(1), "b": logits}) is logits


def test_likelihood_by_name() -> None:
    assert isinstance(as_likelihood("binary"), Binary)
    with pytest.raises(SettingError, match="classification, binary, multilabel, regression"):
        as_likelihood("poisson")


# How much draws disagree


def certain(*classes: int) -> Tensor:
    """Logits `[S, 1, 3]` of draws that are sure of a class each, to the last bit."""
    return 1e5 * functional.one_hot(torch.tensor(classes), 3).float().unsqueeze(1)


@pytest.mark.parametrize(
    ("classes", "expected"),
    [((0, 1), math.log(2)), ((0, 0), 0.0), ((0, 1, 2), math.log(3)), ((0, 0, 1, 1), math.log(2))],
)
def test_information_of_certain_draws(classes: tuple[int, ...], expected: float) -> None:
    found = Classification().mutual_information(certain(*classes))
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_two_draws_disagree_by_log_2_at_most() -> None:
    found = Classification().mutual_information(5 * torch.randn(2, 1000, 7))
    assert (found > -1e-6).all()
    assert (found <= math.log(2) + 1e-6).all()


def test_equal_draws_have_no_information() -> None:
    outputs = torch.randn(1, 5, 4).expand(3, 5, 4)
    for likelihood in (Classification(), Multilabel()):
        found = likelihood.mutual_information(outputs)
        torch.testing.assert_close(found, torch.zeros(5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("likelihood", [Classification(), Multilabel()], ids=lambda x: x.kind)
def test_information_is_what_a_prediction_calls_epistemic(likelihood: bayesify.Likelihood) -> None:
    outputs = 3 * torch.randn(4, 6, 5)
    prediction = bayesify.Prediction(likelihood.kind, averages(likelihood, outputs))
    expected = prediction.epistemic.reshape(6, -1).mean(1)
    found = likelihood.mutual_information(outputs)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_information_of_a_segmentation_is_the_mean_over_positions() -> None:
    outputs = 3 * torch.randn(2, 5, 4, 3, 6)
    found = Classification().mutual_information(outputs)
    assert found.shape == (5,)
    pixels = outputs.permute(0, 1, 3, 4, 2).reshape(2, -1, 4)
    each = Classification().mutual_information(pixels)
    torch.testing.assert_close(found, each.view(5, -1).mean(1))


def test_information_of_yes_and_no() -> None:
    logits = torch.tensor([[1e3], [-1e3]])
    found = Binary().mutual_information(
        torch.stack([Binary().read(row) for row in logits[:, None]])
    )
    torch.testing.assert_close(found, torch.tensor([math.log(2)]))
    labels = torch.tensor([[[1e3, 1e3]], [[-1e3, 1e3]]])  # of two labels, one is disputed
    found = Multilabel().mutual_information(labels)
    torch.testing.assert_close(found, torch.tensor([math.log(2) / 2]))


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (Classification(), certain(0, 1)),
        (Classification(), certain(2, 2)),
        (Multilabel(), torch.tensor([[[1e3, -1e3]], [[-1e3, -1e3]]])),
    ],
    ids=["opposite", "equal", "labels"],
)
def test_gradients_are_finite_where_probabilities_are_0(
    likelihood: bayesify.Likelihood, outputs: Tensor
) -> None:
    outputs = outputs.clone().requires_grad_()
    assert (likelihood.statistics(outputs)["probs"] == 0).any()
    likelihood.mutual_information(outputs).sum().backward()
    assert torch.isfinite(outputs.grad).all()


def test_information_has_the_gradient_of_its_formula() -> None:
    outputs = torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_()

    def information(logits: Tensor) -> Tensor:
        return Classification().mutual_information(logits).sum()

    (found,) = torch.autograd.grad(information(outputs), outputs)
    probs = outputs.softmax(2)
    total = -(probs.mean(0) * probs.mean(0).log()).sum()
    (expected,) = torch.autograd.grad(total + (probs * probs.log()).sum() / 2, outputs)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_values_have_no_information_to_train_on() -> None:
    with pytest.raises(SettingError, match="'classification', 'binary' or 'multilabel'"):
        Regression().mutual_information(torch.randn(2, 3, 2, 1))


def test_wrong_likelihood_for_the_network(cnn: nn.Module, images: Tensor) -> None:
    one = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.LayerNorm(1))
    with pytest.raises(DataError, match="likelihood='binary' for one logit"):
        bayesify.convert(one).predict(images)
