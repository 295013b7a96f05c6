r"""Answering only where sure: what accuracy is to be had for what coverage.

Examples are sorted by rising uncertainty, and the k surest are answered: coverage is k/n, the risk
is the share of mistakes among them, and

$$AURC = \frac{1}{n} \sum_{k=1}^n risk(k)$$

(Geifman and El-Yaniv, *Selective Classification for Deep Neural Networks*, NeurIPS 2017,
https://arxiv.org/abs/1705.08500). Among equal uncertainties mistakes are spread evenly, which is
the mean over their orders. Ten buckets of equal size with rising uncertainty are BayesAdapter's
picture of the same (Deng et al., figure 5).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.errors import DataError
from bayesify.evaluation.checks import flags, share
from bayesify.evaluation.ranking import Groups, borders, cumulate, group, run

BUCKETS = 10
COVERAGES = (0.8, 0.9, 0.95)
CANDIDATES = 20


@dataclass(frozen=True)
class RiskCoverage:
    """What answering up to each of the thresholds gives, by rising threshold.

    Args:
        threshold: The largest uncertainty that is answered, `[G]`.
        coverage: Share of examples answered, `[G]`.
        risk: Share of mistakes among them, `[G]`.
    """

    threshold: Tensor
    coverage: Tensor
    risk: Tensor


@dataclass(frozen=True)
class Threshold:
    """Up to which uncertainty to answer.

    Args:
        value: The largest uncertainty that is answered.
        coverage: Share of the validation data answered.
        risk: Share of mistakes among them.
        bound: What the risk on new data stays below, if a confidence was asked for.
    """

    value: float
    coverage: float
    risk: float
    bound: float | None = None


def risk_coverage(uncertainty: Tensor, correct: Tensor) -> RiskCoverage:
    """The risk-coverage curve, a point for each uncertainty that occurs.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 1, 0]))
        >>> curve.risk
        tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """
    groups = _mistakes(uncertainty, correct)
    answered = groups.count.cumsum(0)
    return RiskCoverage(groups.score, answered / answered[-1], groups.flagged.cumsum(0) / answered)


def aurc(uncertainty: Tensor, correct: Tensor) -> float:
    """Area under the risk-coverage curve: the mean risk over all coverages.

    Example:
        >>> aurc(torch.tensor([0.1, 0.2]), torch.tensor([True, False]))
        0.25
    """
    return area(_mistakes(uncertainty, correct)).item()


def accuracy_at_coverage(uncertainty: Tensor, correct: Tensor, coverage: float = 0.9) -> float:
    """Accuracy on the surest share of the examples, rounded up to whole ones.

    Example:
        >>> accuracy_at_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([1, 1, 0]), 0.6)
        1.0
    """
    return accuracy_of_surest(_mistakes(uncertainty, correct), coverage).item()


def accuracy_by_uncertainty(uncertainty: Tensor, correct: Tensor, buckets: int = BUCKETS) -> Tensor:
    """Accuracy in buckets of equal size with rising uncertainty, `[buckets]`.

    An example that lies across a border counts on both sides by its share.
    """
    return accuracy_of_buckets(_mistakes(uncertainty, correct), buckets)


def choose_threshold(
    uncertainty: Tensor, correct: Tensor, risk: float, *, confidence: float | None = None
) -> Threshold:
    """The threshold that answers most of the validation data at no more than this risk.

    With a confidence, the risk on new data of the same kind stays below `risk` with at least that
    probability: of twenty coverages, the largest whose mistakes pass an exact binomial test, each
    at a twentieth of the level (after Geifman and El-Yaniv). That costs coverage; without it, a
    risk that is just met on validation data is as likely as not to be exceeded.

    Args:
        uncertainty: Of the validation data.
        correct: Whether each answer is right.
        risk: The largest share of mistakes among the answers.
        confidence: How sure that must be on new data, 0.95 for instance.

    Raises:
        DataError: If no threshold keeps to the risk.

    Example:
        >>> choose_threshold(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]), 0.1).value
        2.0
    """
    share("risk", risk)
    groups = _mistakes(uncertainty, correct)
    answered, wrong = groups.count.cumsum(0), groups.flagged.cumsum(0)
    if confidence is None:
        kept = (wrong / answered <= risk).nonzero().flatten().tolist()
        found, bound = (kept[-1] if kept else None), None
    else:
        found, bound = _tested(answered, wrong, risk, 1 - share("confidence", confidence))
    if found is None:
        sure = "" if confidence is None else f" with a confidence of {confidence:g}"
        raise DataError(
            f"no threshold keeps the risk at {risk:g}{sure}: of the {int(answered[0])} surest "
            f"validation examples {int(wrong[0])} are wrong, of all {int(answered[-1])} "
            f"{int(wrong[-1])}. Allow more risk, or use more validation data."
        )
    rate = (wrong / answered)[found].item()
    coverage = (answered[found] / answered[-1]).item()
    return Threshold(groups.score[found].item(), coverage, rate, bound)


def _tested(
    answered: Tensor, wrong: Tensor, risk: float, level: float
) -> tuple[int | None, float | None]:
    """The last of some thresholds at which the true risk is surely below, and what bounds it."""
    from scipy.stats import beta

    wanted = torch.linspace(1, 0, CANDIDATES + 1, dtype=torch.float64)[:-1] * answered[-1]
    for place in torch.searchsorted(answered, wanted - 1e-9).tolist():
        mistakes = wrong[place].item()
        right = answered[place].item() - mistakes
        # Clopper and Pearson's upper limit; all wrong has none.
        limit = float(beta.ppf(1 - level / CANDIDATES, mistakes + 1, right)) if right else 1.0
        if limit <= risk:
            return place, limit
    return None, None


def _mistakes(uncertainty: Tensor, correct: Tensor) -> Groups:
    return group(uncertainty, ~flags("correct", correct))


# The same, of groups by rising uncertainty whose flag is to be a mistake.


def area(groups: Groups) -> Tensor:
    """AURC."""
    rate = groups.flagged / groups.count
    answered, wrong = groups.count.cumsum(0), groups.flagged.cumsum(0)
    risks = run(wrong - groups.flagged, rate, answered - groups.count, groups.count)
    return risks.sum() / answered[-1]


def accuracy_of_surest(groups: Groups, coverage: float) -> Tensor:
    """Accuracy at a coverage."""
    total = groups.count.sum().item()
    # 0.95 * 20 is a hair above 19.
    answered = torch.tensor(max(1, math.ceil(share("coverage", coverage) * total - 1e-9))).double()
    return 1 - cumulate(groups.flagged, groups.count, answered) / answered


def accuracy_of_buckets(groups: Groups, buckets: int = BUCKETS) -> Tensor:
    """Accuracy in buckets of equal size."""
    at = borders(groups, buckets)
    return 1 - cumulate(groups.flagged, groups.count, at).diff() / at.diff()


def summarise(groups: Groups, coverages: Iterable[float], buckets: int) -> dict[str, Tensor]:
    """`aurc`, `accuracy_at_80` and so on, and `buckets`."""
    accuracies = {
        f"accuracy_at_{100 * coverage:g}": accuracy_of_surest(groups, coverage)
        for coverage in coverages
    }
    return {"aurc": area(groups), **accuracies, "buckets": accuracy_of_buckets(groups, buckets)}


def bounds(
    groups: Groups, coverages: Iterable[float], buckets: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The least and the most that each number of `summarise` can be, for groups that are bins.

    The mistakes of a bin may all be among its surest examples, or all among the others.
    """
    worst, best = (groups.split(flagged_first=first) for first in (True, False))
    least, most = (summarise(ends, coverages, buckets) for ends in (worst, best))
    least["aurc"], most["aurc"] = most["aurc"], least["aurc"]
    at = borders(groups, buckets)
    many, few = (cumulate(ends.flagged, ends.count, at) for ends in (worst, best))
    size = at.diff()
    least["buckets"] = 1 - (many[1:] - few[:-1]).minimum(size) / size
    most["buckets"] = 1 - (few[1:] - many[:-1]).clamp_min(0) / size
    return least, most
