"""Predictions as a table that is written while it is made: a row an example, a batch at a time.

Above a threshold of total uncertainty (entropy, or a regression's standard deviation) a row says
that it abstains, and its answer is empty. The threshold is given, or chosen on labelled data so
that the answers keep to a risk (see `bayesify.evaluation.selective`).
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from bayesify.batches import labelled, split_batch
from bayesify.data import Readable
from bayesify.errors import SettingError
from bayesify.evaluation.selective import Threshold, choose_threshold
from bayesify.model import BayesianModel
from bayesify.prediction import Prediction

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Row: TypeAlias = dict[str, Any]

DOUBT = {"classes": "entropy", "labels": "entropy", "values": "std"}
ANSWER = {"classes": "label", "values": "mean"}


@dataclass
class PredictionTable:
    """What a network says about data, and how often it said nothing.

    Args:
        model: The Bayesian network.
        threshold: The largest uncertainty that is answered; None answers always.
        draws: Draws of a prediction.
        seed: Seed of the draws.
        tolerance: Lets easy examples stop early; see `BayesianModel.predict`.
        examples: How many rows there have been.
        abstained: How many of them had no answer.
    """

    model: BayesianModel
    threshold: float | None = None
    draws: int | None = None
    seed: int = 0
    tolerance: float | None = None
    examples: int = 0
    abstained: int = 0

    def rows(self, data: Readable, name: str | None = None) -> Iterator[Row]:
        """Rows for data that can be read, in order.

        The column `file` has the path of what is a file, `name` of what is none, and is not there
        if there is neither.
        """
        for places, batch in data.numbered():
            inputs, _ = split_batch(batch)
            prediction = self.model.predict(
                inputs, draws=self.draws, seed=self.seed, tolerance=self.tolerance
            )
            for place, row in zip(places, self._answers(prediction), strict=True):
                file = data.name(place) or name
                yield row if file is None else {"file": file, **row}

    def _answers(self, prediction: Prediction) -> Iterator[Row]:
        columns = {name: values.tolist() for name, values in prediction.columns().items()}
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            self.examples += 1
            if self.threshold is not None:
                abstains = row[DOUBT[prediction.kind]] > self.threshold
                self.abstained += abstains
                if abstains and prediction.kind in ANSWER:
                    row[ANSWER[prediction.kind]] = None
                row = {"abstained": abstains, **row}
            yield row


def learn_threshold(
    model: BayesianModel,
    loader: Iterable[Any],
    risk: float,
    *,
    confidence: float | None = None,
    draws: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> Threshold:
    """The entropy up to which to answer, so that the answers on labelled data keep to a risk.

    Keeps one number and one flag an example. See `choose_threshold`.
    """
    if model.likelihood.kind != "classes":
        raise SettingError(
            "a risk is a share of wrong answers, which only classification has: give a threshold "
            "instead."
        )
    doubt, correct = [], []
    for inputs, target in labelled(loader):
        prediction = model.predict(inputs, draws=draws, seed=seed, tolerance=tolerance)
        prediction.columns()  # one answer an example, or an error
        wanted = model.target_for(prediction, target)
        counted = wanted != getattr(model.likelihood, "ignore_index", -100)
        doubt.append(prediction.entropy[counted].cpu())
        correct.append((prediction.label == wanted)[counted].cpu())
    return choose_threshold(torch.cat(doubt), torch.cat(correct), risk, confidence=confidence)


def write_csv(rows: Iterable[Row], stream: "SupportsWrite[str]") -> None:
    """Writes rows as they come, the columns' names first."""
    writer = csv.writer(stream, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow(map(_cell, row.values()))


def write_json_lines(rows: Iterable[Row], stream: "SupportsWrite[str]") -> None:
    """Writes rows as they come, an object a line."""
    for row in rows:
        stream.write(json.dumps({name: _rounded(value) for name, value in row.items()}) + "\n")


WRITERS: dict[str, Callable[[Iterable[Row], "SupportsWrite[str]"], None]] = {
    ".csv": write_csv,
    ".jsonl": write_json_lines,
    ".ndjson": write_json_lines,
}
"""How to write a table, by the ending of its name."""


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else value
