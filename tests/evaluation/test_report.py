"""evaluate: the same as the pure functions, of pixels too, and in any batches."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, BayesianModel, Classification
from bayesify.errors import DataError
from bayesify.evaluation import tally
from bayesify.evaluation.calibration import adaptive_calibration_error, calibration_error
from bayesify.evaluation.classification import brier, correct
from bayesify.evaluation.detection import detect, detect_mistakes
from bayesify.evaluation.segmentation import counted_pixels, mean_iou
from bayesify.evaluation.selective import aurc
from bayesify.prediction import Prediction

VOID = 255


def segmenter(stride: int = 1) -> BayesianModel:
    torch.manual_seed(2)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, stride=stride),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 3, 1),
    ).eval()
    with torch.no_grad():
        network[3].weight *= 4
    return bayesify.convert(
        network, ABNN(members=1, draws=4, noise=0.5), likelihood=Classification(ignore_index=VOID)
    )


def pictures(size: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(10, 1, size, size)
    target = torch.randint(0, 3, (10, size, size))
    target[:, :2] = VOID
    target[4] = VOID  # a whole picture, and below a whole batch
    return x, target


def pixels(bnn: BayesianModel, x: Tensor, target: Tensor) -> tuple[Prediction, Tensor]:
    """Every pixel that counts as an example of its own."""
    probs, wanted = counted_pixels(bnn.predict(x).probs, target, VOID)
    return Prediction("classes", {"probs": probs, "aleatoric": torch.zeros(len(probs))}), wanted


def test_examples_are_measured_exactly(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], test_set: DataLoader
) -> None:
    bnn = bayesify.convert(trained, ABNN(draws=6))
    x, y = stripes[0][450:], stripes[1][450:]
    strange = 3 * torch.randn(60, 1, 8, 8)
    report = bnn.evaluate(
        test_set, ood={"strange": [(strange[:50],), (strange[50:],)], "whole": strange}
    )
    p = bnn.predict(x)
    right = correct(p.probs, y)
    assert report.examples == len(x)
    assert report.accuracy == pytest.approx(right.double().mean().item())
    assert report.ece == pytest.approx(calibration_error(p.confidence, right), abs=1e-6)
    expected = adaptive_calibration_error(p.confidence, right)
    assert report.adaptive_ece == pytest.approx(expected, abs=1e-6)
    assert report.brier == pytest.approx(brier(p.probs, y).mean().item(), abs=1e-6)
    assert report.aurc == pytest.approx(aurc(p.entropy, right), abs=1e-6)
    expected = detect_mistakes(p.entropy, right).auroc
    assert report.mistakes_auroc == pytest.approx(expected, abs=1e-6)
    found = detect(p.entropy, bnn.predict(strange).entropy)
    for name in ("strange", "whole"):
        assert report.ood[name].auroc == pytest.approx(found.auroc, abs=1e-6)
        assert report.ood[name].aupr_inside == pytest.approx(found.aupr_inside, abs=1e-6)
    assert report.miou is None
    assert report.ranking_error is None


@pytest.mark.parametrize("stride", [1, 4], ids=["full", "coarse"])
def test_pixels_are_measured_at_full_resolution(stride: int) -> None:
    bnn, (x, target) = segmenter(stride), pictures()
    loader = DataLoader(TensorDataset(x, target), batch_size=3)
    strange = torch.randn(6, 1, 16, 16) * 5
    report = bnn.evaluate(loader, ood={"strange": [(strange[:4],), (strange[4:],)]})
    p, wanted = pixels(bnn, x, target)
    outside, _ = pixels(bnn, strange, torch.zeros(6, 16, 16))
    right = p.label == wanted
    assert report.examples == 10
    assert report.accuracy == pytest.approx(right.double().mean().item())
    assert report.ece == pytest.approx(calibration_error(p.confidence, right), abs=1e-6)
    assert report.brier == pytest.approx(brier(p.probs, wanted).mean().item(), abs=1e-6)
    assert report.miou == pytest.approx(mean_iou(p.label, wanted, 3), abs=1e-9)
    slack = report.ranking_error
    assert slack is not None
    assert 0 < slack < 0.05
    expected = adaptive_calibration_error(p.confidence, right)
    assert report.adaptive_ece == pytest.approx(expected, abs=slack)
    assert report.aurc == pytest.approx(aurc(p.entropy, right), abs=slack)
    expected = detect_mistakes(p.entropy, right).auroc
    assert report.mistakes_auroc == pytest.approx(expected, abs=slack)
    found = detect(p.entropy, outside.entropy)
    for name in ("auroc", "aupr", "fpr95", "aupr_inside"):
        value = getattr(report.ood["strange"], name)
        assert value == pytest.approx(getattr(found, name), abs=slack), name
    assert "miou" in str(report)
    assert report.to_dict()["miou"] == report.miou


def test_pixels_of_other_sets_are_as_fine_as_those_of_the_test_set() -> None:
    """Between coarse predictions lie uncertain ones: with them on one side, sets would differ."""
    bnn, (x, target) = segmenter(stride=4), pictures()
    target[:] = 0
    report = bnn.evaluate([(x, target)], ood={"bare": [(x,)], "labelled": [(x, target)]})
    slack = report.ranking_error
    assert report.ood["bare"] == report.ood["labelled"]
    assert report.ood["bare"].auroc == pytest.approx(0.5, abs=slack)


def test_the_nll_is_a_mean_over_pictures() -> None:
    bnn, (x, target) = segmenter(), pictures()
    kept = [0, 1, 2, 3, 5, 6, 7, 8, 9]  # one of void pixels only has none
    report = bnn.evaluate([(x[kept], target[kept])])
    probs = bnn.predict(x[kept]).probs
    counted = target[kept] != VOID
    chosen = probs.gather(1, target[kept].where(counted, 0).unsqueeze(1)).squeeze(1).log()
    means = (-chosen * counted).flatten(1).sum(1) / counted.flatten(1).sum(1)
    assert report.nll == pytest.approx(means.mean().item(), abs=1e-5)


def test_batches_make_no_difference() -> None:
    bnn, (x, target) = segmenter(), pictures()
    one, other = (
        bnn.evaluate(DataLoader(TensorDataset(x, target), batch_size=size)) for size in (5, 10)
    )
    measured = {**one.to_dict(), "strategy": other.strategy}  # which may differ with the batch
    for name, value in measured.items():
        assert getattr(other, name) == pytest.approx(value, abs=1e-5), name


def test_what_is_kept_does_not_grow_with_pixels() -> None:
    kept = tally.Tally(segmenter().predict(pictures()[0]), ["strange"])
    ranked = (kept.adaptive, kept.selective, kept.mistakes, *kept.detectors.values())
    assert all(measure.bins == tally.BINS for measure in ranked)


def test_a_batch_of_void_adds_nothing_and_all_void_is_an_error() -> None:
    bnn, (x, target) = segmenter(), pictures()
    void = torch.full_like(target, VOID)
    report = bnn.evaluate([(x[:4], target[:4]), (x, void)])
    assert report.accuracy == bnn.evaluate([(x[:4], target[:4])]).accuracy
    with pytest.raises(DataError, match="nothing to measure"):
        bnn.evaluate([(x, void)])


def test_sizes_that_do_not_go_together() -> None:
    bnn, (x, target) = segmenter(), pictures()
    with pytest.raises(DataError, match="cannot be brought to the target's"):
        bnn.evaluate([(x, target[:5])])
    with pytest.raises(DataError, match="targets have shape"):
        bnn.evaluate([(x, target[:, 0])])
