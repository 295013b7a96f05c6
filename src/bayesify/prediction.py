"""What a Bayesian network says: probabilities, and how much of the doubt is whose."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.errors import DataError, MissingExtraError, NonFiniteError, SettingError

if TYPE_CHECKING:
    import pandas as pd


class Prediction:
    """Predictions for a batch, averaged over draws.

    Classification and multilabel: total uncertainty H(mean p) = aleatoric mean H(p) + epistemic,
    in nats: the data's doubt and the model's own. Regression: variances, by the law of total
    variance.

    Args:
        kind: "classes", "labels" (multilabel) or "values" (regression).
        averages: The likelihood's statistics, averaged over draws.
        draws: Each draw's probabilities or means `[S, B, ...]`, if kept.
        used: How many draws each example took `[B]`, where that was adapted to it (`tolerance=`).
    """

    def __init__(
        self,
        kind: str,
        averages: Mapping[str, Tensor],
        draws: Tensor | None = None,
        used: Tensor | None = None,
    ) -> None:
        self.kind = kind
        self.averages = dict(averages)
        self.draws = draws
        self.used = used

    @property
    def probs(self) -> Tensor:
        """Mean probabilities, `[B, C, ...]`."""
        return self._of("classes", "labels")["probs"]

    @property
    def label(self) -> Tensor:
        """The most probable class `[B, ...]`, or each label's yes or no `[B, C, ...]`."""
        return self.probs > 0.5 if self.kind == "labels" else self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`."""
        if self.kind == "labels":
            return torch.maximum(self.probs, 1 - self.probs)
        return self.probs.amax(1)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty H(mean p), in nats."""
        summands = torch.special.entr(self.probs)
        if self.kind == "labels":
            return summands + torch.special.entr(1 - self.probs)
        return summands.sum(1)

    @property
    def aleatoric(self) -> Tensor:
        """The data's own doubt: mean H(p) in nats, or the mean noise variance."""
        if self.kind == "values":
            return self.averages["aleatoric"]
        return torch.minimum(self.averages["aleatoric"], self.entropy)

    @property
    def epistemic(self) -> Tensor:
        """The model's own doubt: how far draws disagree. Never negative."""
        if self.kind == "values":
            return (self.averages["square"] - self.averages["mean"].square()).clamp_min(0)
        return self.entropy - self.aleatoric

    @property
    def mean(self) -> Tensor:
        """Regression: the mean, `[B, ...]`."""
        return self._of("values")["mean"]

    @property
    def variance(self) -> Tensor:
        """Regression: aleatoric plus epistemic."""
        return self._of("values")["aleatoric"] + self.epistemic

    @property
    def std(self) -> Tensor:
        """Regression: the square root of the variance."""
        return self.variance.sqrt()

    @property
    def uncertainty(self) -> Tensor:
        """Total uncertainty of whichever kind: entropy or variance."""
        return self.variance if self.kind == "values" else self.entropy

    def __len__(self) -> int:
        return len(self.averages["aleatoric"])

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> "Prediction":
        """Some of the examples; one number keeps the batch dimension."""
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"example {rows} of a prediction for {len(self)}")
            rows = [rows]
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        averages = {name: value[index] for name, value in self.averages.items()}
        return Prediction(
            self.kind,
            averages,
            None if self.draws is None else self.draws[:, index],
            None if self.used is None else self.used[index],
        )

    @staticmethod
    def cat(predictions: Sequence["Prediction"]) -> "Prediction":
        """Joins predictions for several batches."""
        if not predictions:
            raise DataError("there is nothing to join: pass at least one prediction.")
        kinds = {prediction.kind for prediction in predictions}
        if len(kinds) > 1:
            raise DataError(f"predictions of different kinds cannot be joined: {sorted(kinds)}.")
        kept = [prediction.draws for prediction in predictions if prediction.draws is not None]
        used = [prediction.used for prediction in predictions if prediction.used is not None]
        return Prediction(
            predictions[0].kind,
            {
                name: torch.cat([prediction.averages[name] for prediction in predictions])
                for name in predictions[0].averages
            },
            torch.cat(kept, dim=1) if len(kept) == len(predictions) else None,
            torch.cat(used) if len(used) == len(predictions) else None,
        )

    def to(self, device: torch.device | str) -> "Prediction":
        """The same prediction on another device."""
        averages = {name: value.to(device) for name, value in self.averages.items()}
        return Prediction(
            self.kind,
            averages,
            None if self.draws is None else self.draws.to(device),
            None if self.used is None else self.used.to(device),
        )

    def require_finite(self) -> "Prediction":
        """Returns the prediction itself.

        Raises:
            NonFiniteError: If there is a NaN in it.
        """
        doubt = self.averages["aleatoric"]
        bad = torch.isnan(doubt).reshape(len(doubt), -1).any(1)
        if bad.any():
            raise NonFiniteError(
                f"the network gives NaN for {int(bad.sum())} of {len(bad)} examples, the first at "
                f"position {int(bad.nonzero()[0])} of its batch. Try less noise, or full precision."
            )
        return self

    def columns(self) -> dict[str, Tensor]:
        """What a table of one row an example shows, each `[B]`.

        Raises:
            SettingError: For dense predictions, which have many numbers an example.
        """
        used = {} if self.used is None else {"used": self.used}
        if self.uncertainty.ndim > 1 and self.uncertainty[0].numel() > 1:
            if self.kind == "labels" and self.probs.ndim == 2:
                return (
                    {f"prob_{c}": self.probs[:, c] for c in range(self.probs.shape[1])}
                    | {
                        "entropy": self.entropy.sum(1),
                        "aleatoric": self.aleatoric.sum(1),
                        "epistemic": self.epistemic.sum(1),
                    }
                    | used
                )
            raise SettingError(
                f"a table has one row an example, and these predictions have "
                f"{list(self.uncertainty.shape[1:])} values each. Use the tensors themselves."
            )
        names = ("mean", "std") if self.kind == "values" else ("label", "confidence", "entropy")
        columns = {name: getattr(self, name) for name in (*names, "aleatoric", "epistemic")}
        columns |= used
        if self.kind == "classes":
            columns |= {f"prob_{c}": self.probs[:, c] for c in range(self.probs.shape[1])}
        return {name: value.flatten() for name, value in columns.items()}

    def to_pandas(self) -> "pd.DataFrame":
        """One row an example: label, confidence, uncertainties and probabilities.

        Raises:
            MissingExtraError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas() needs pandas: pip install 'bayesify[pandas]'."
            ) from error
        return pd.DataFrame({name: value.cpu().numpy() for name, value in self.columns().items()})

    def __repr__(self) -> str:
        shown = 5
        head = f"Prediction for {len(self)} example{'s' if len(self) != 1 else ''}"
        if self.draws is not None:
            head += f", {len(self.draws)} draws kept"
        try:
            columns = {n: v for n, v in self[:shown].columns().items() if n[:5] != "prob_"}
        except SettingError:
            shape = list(self.uncertainty.shape)
            return f"{head}: {self.kind}, {shape}, mean uncertainty {self.uncertainty.mean():.4f}"
        rows = ["  ".join(f"{name:>10}" for name in columns)]
        for values in zip(*columns.values(), strict=True):
            rows.append("  ".join(f"{_short(value):>10}" for value in values))
        if len(self) > shown:
            rows.append(f"{'...':>10}")
        return "\n".join([head, *rows])

    def _of(self, *kinds: str) -> dict[str, Tensor]:
        if self.kind not in kinds:
            has = "mean and std" if self.kind == "values" else "probs, label and entropy"
            raise AttributeError(f"a prediction of {self.kind} has {has} instead")
        return self.averages


def _short(value: Any) -> str:
    number = value.item()
    return f"{number:.4f}" if isinstance(number, float) else str(number)
