"""The gradients of a training batch: which draw each example runs at, and what its loss is.

Every example has a draw of its own, or groups of a batch share one. Draws depend on the place in
the whole batch, so that a batch has the same gradients whether it runs at once, in parts or in
several processes. Where only late layers train, what stands before them runs once for all rounds.
"""

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import Inputs
from bayesify.errors import DataError
from bayesify.gates import GATE
from bayesify.outliers import Outliers
from bayesify.posterior import Draws, fresh_normals, key
from bayesify.rows import Rows
from bayesify.sampling import MOST_SHAPES, Runner
from bayesify.sites import NORM, Site
from bayesify.tape import channels_last
from bayesify.trunk import Rest, Split, is_plain, split

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

GROUPS = 4


class Gradients:
    """Adds up the gradients of what a posterior trains.

    Args:
        model: Its posterior's parameters get the gradients.
        outliers: Inputs on which it should not be sure, for methods that train on them.
        groups: Draws a batch; None for the method's own choice.
        precision: Type of mixed precision, None for none.
        seed: Of the fit.
    """

    def __init__(
        self,
        model: "BayesianModel",
        outliers: Outliers | None,
        groups: int | None,
        precision: torch.dtype | None,
        seed: int,
    ) -> None:
        self.model = model
        self.method = model.method
        self.outliers = outliers
        self.precision = precision
        self.seed = seed
        self.adapts = [name for name, _ in model.posterior.statistics.items()]
        self.groups = self._evenly(groups or self._default_groups())
        self.by_rows: dict[str, bool] = {}  # of kinds of input: whether gates have a row for each
        self.prepare()

    def prepare(self) -> None:
        """To be called when the model is where it will train."""
        model = self.model
        self.scaler = torch.amp.GradScaler(
            model.device.type, enabled=self.precision is torch.float16
        )
        self.runner = model.runner
        if self.adapts:
            self.runner = Runner(
                model.network, model.likelihood.read, model.posterior.shared, adapting=self.adapts
            )
        self._splits: dict[str, Split | None] = {}

    def add(self, inputs: Inputs, target: Tensor, step_seed: int, mine: slice) -> float:
        """Adds the gradients of rows `mine` of a batch, and returns their share of the loss."""
        total, size = 0.0, len(inputs)
        here = inputs[mine].to(self.model.device)
        runner = self.runner
        if self.method.rounds() > 1 and (found := self.split(here)):
            runner, here = found.rest, found.features(here)
        for turn in range(self.method.rounds()):
            seed = key("round", step_seed, turn)
            with self._autocast():
                losses = self._losses(runner, here, target[mine], turn, seed, mine, size)
            loss = losses.sum() / size
            total += loss.item() / self.method.rounds()
            self.scaler.scale(loss * self.method.round_weight).backward()
        if self.outliers is not None:
            with self._autocast():
                doubt = self._outlier_losses(inputs, target, step_seed, mine)
            if doubt is not None:
                total += doubt.item()
                self.scaler.scale(doubt).backward()
        return total

    def add_penalty(self, progress: float, examples: int) -> float:
        """Adds the gradients of what the method adds to the loss, once a step."""
        penalty = self.method.penalty(self.model.posterior, progress, examples)
        if penalty is None:
            return 0.0
        self.scaler.scale(penalty).backward()
        return penalty.item()

    def vector(self, inputs: Inputs, target: Tensor, seed: int) -> Tensor:
        """The gradient of a batch that is all the data, of all that trains, as one vector.

        Running statistics are not adapted, and the penalty counts in full.
        """
        self.runner = self.model.runner
        self.model.zero_grad()
        self.add(inputs, target, seed, slice(0, len(inputs)))
        self.add_penalty(1.0, len(inputs))
        parameters = list(self.model.posterior.parameters())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.model.zero_grad()
        return torch.cat([grad.flatten() for grad in grads])

    def try_outliers(self, inputs: Inputs, target: Tensor) -> None:
        """Runs two outliers once, which raises if the likelihood has no use for them."""
        few = inputs[:2]
        with torch.no_grad(), self._autocast():
            self._outlier_losses(few, target[:2], self.seed, slice(0, len(few)))

    def strange(self, inputs: Inputs, target: Tensor, seed: int) -> Inputs:
        """Outliers for a batch, turned against the network as it is now if the method asks so."""
        assert self.outliers is not None  # noqa: S101  (asked before)
        loss = self._attacked(target) if self.outliers.steps else None
        return self.outliers.batch(inputs, seed, loss)

    def split(self, inputs: Inputs) -> Split | None:
        """Trunk and rest for inputs of this kind, found out once; None if the network runs whole.

        Mixed precision is the network's own affair, and so are statistics that adapt.
        """
        if self.precision is not None or self.runner is not self.model.runner:
            return None
        kind = inputs[:1].describe()
        if isinstance(self.runner, Rest) or not is_plain(inputs):
            return None
        if kind not in self._splits and len(inputs) > 1 and len(self._splits) < MOST_SHAPES:
            paired = self._is_exemplar(self.runner, inputs)
            with torch.no_grad():
                draws = self.model.posterior.in_training().draws(self.seed, range(2))
            self._splits[kind] = split(self.runner, draws, inputs, paired=paired)
        return self._splits.get(kind)

    def _losses(
        self,
        runner: Runner,
        inputs: Inputs,
        target: Tensor,
        turn: int,
        seed: int,
        mine: slice,
        size: int,
    ) -> Tensor:
        """Each example's loss; draws depend on its place in the whole batch of all processes."""
        model = self.model
        output = self._run(runner, inputs, turn, seed, mine, size)
        target = model.likelihood.target(target, output)
        weight = None
        if model.likelihood.kind == "classes":
            weight = self.method.class_weights(turn, output.shape[1], self.seed)
        losses = model.likelihood.loss(
            output, target, None if weight is None else weight.to(output)
        )
        counts = self.method.example_weights(turn, size, seed)
        return losses if counts is None else losses * counts[mine].to(losses)

    def _outlier_losses(
        self, inputs: Inputs, target: Tensor, step_seed: int, mine: slice
    ) -> Tensor | None:
        """The method's loss on outliers, each run at two draws at once."""
        strange = self.strange(inputs, target, step_seed)
        size, count = len(inputs), len(strange)
        rows = slice(mine.start * count // size, mine.stop * count // size)
        if rows.start == rows.stop:
            return None
        once = strange[rows].to(self.model.device)
        seed = key("outliers", step_seed)
        # The frozen runner: outliers must not shift statistics that adapt.
        output = self._run(self.model.runner, once, 0, seed, rows, count, copies=2)
        information = self.model.likelihood.mutual_information(output.unflatten(0, (2, -1)))
        return self.method.ood_loss(information).sum() / count

    def _attacked(self, target: Tensor) -> Callable[[Inputs], Tensor]:
        """The loss of the batch's first inputs, as they change, without noise."""
        model = self.model
        posterior = model.posterior.in_training()
        still = {name: torch.zeros(1, *shape) for name, shape in posterior.shapes().items()}
        with torch.no_grad():
            drawn = posterior(self.method.component(0, 1), still)
        draw = {name: value[0] for name, value in drawn.items()}

        def losses(inputs: Inputs) -> Tensor:
            output = model.runner.plain(draw, inputs.to(model.device).map(channels_last))
            aim = model.likelihood.target(target[: len(inputs)], output)
            return model.likelihood.loss(output, aim, None)

        return losses

    def _run(
        self,
        runner: Runner,
        inputs: Inputs,
        turn: int,
        seed: int,
        mine: slice,
        size: int,
        copies: int = 1,
    ) -> Tensor:
        """Outputs for rows `mine` of `size`, each at a draw of its own or at its group's.

        Copies of the rows stand behind each other, and no two copies of a row share a draw.
        """
        model = self.model
        if copies > 1:
            inputs = inputs.map_batched(lambda t: torch.cat([t] * copies))
        exemplar = self._is_exemplar(runner, inputs)
        whole = copies * size
        count = whole if exemplar else min(max(self.groups or 1, copies), whole)

        def own(each: Tensor) -> Tensor:
            part = each.unflatten(0, (copies, size))[:, mine].flatten(0, 1) if exemplar else each
            return part.to(model.device)

        posterior = model.posterior.in_training()
        noise = fresh_normals(posterior.shapes(), seed=seed, count=count)
        draws = posterior(
            own(self.method.component(turn, count)), {n: own(value) for n, value in noise.items()}
        )
        if exemplar and self.by_rows.get(inputs[:1].describe()):
            with Rows():
                return self._frozen_for_one(runner, inputs).plain(draws, inputs.map(channels_last))
        if exemplar and draws:
            apart = inputs.map_batched(lambda t: t.unsqueeze(1))
            return self._frozen_for_one(runner, inputs).paired(draws, apart).flatten(0, 1)
        inputs = inputs.map(channels_last)
        places = [c * size + row for c in range(copies) for row in range(mine.start, mine.stop)]
        bounds = [bisect_left(places, g * whole // count) for g in range(count + 1)]
        return torch.cat(
            [
                self._frozen_for_one(runner, inputs[first:last]).plain(
                    {n: v[g] for n, v in draws.items()}, inputs[first:last]
                )
                for g, (first, last) in enumerate(pairwise(bounds))
                if first < last
            ]
        )

    def _frozen_for_one(self, runner: Runner, inputs: Inputs) -> Runner:
        """A single example has no statistics: it runs with those that are there."""
        return self.model.runner if len(inputs) == 1 and runner is self.runner else runner

    def _is_exemplar(self, runner: Runner, inputs: Inputs) -> bool:
        """Whether every example gets a draw of its own: if the network can be vectorised so.

        The rest behind a trunk does as the network does.
        """
        kind = inputs[:1].describe()
        if self.groups is None and not isinstance(runner, Rest) and kind not in self.by_rows:
            with torch.no_grad():
                draws = self.model.posterior.in_training().draws(self.seed, range(2))
            with torch.autocast(self.model.device.type, enabled=False):
                rows = self._runs_by_rows(draws, inputs)
            several = len(inputs) > 1
            if several:
                self.by_rows[kind] = rows
            if not draws or (self.adapts and several and not rows):
                self.groups = self._evenly(1)
            elif not (rows or self.model.runner.can_vectorise(draws, inputs, paired=True)):
                self.groups = self._evenly(GROUPS)
        return self.groups is None

    @torch.no_grad()
    def _runs_by_rows(self, draws: Draws, inputs: Inputs) -> bool:
        """Whether gates and norms with a row for each example do what a loop over them does.

        Then a batch runs as one, which is faster than vmap, and can have statistics of its own.
        """
        few = inputs[:3]
        if len(few) < 2 or not all(map(_can_have_rows, self.model.sites)):
            return False
        random = torch.Generator().manual_seed(0)
        rows = {
            name: 0.5 + torch.rand(len(few), *value.shape[1:], generator=random).to(value)
            for name, value in draws.items()
        }
        run = self.model.runner.plain
        try:
            with Rows():
                together = run(rows, few)
        except DataError:
            return False
        alone = [run({n: v[i] for n, v in rows.items()}, few[i : i + 1]) for i in range(len(few))]
        expected = torch.cat(alone)
        if together.shape != expected.shape:
            return False
        close = 1e-3 * expected.abs().max().item()
        return torch.allclose(together, expected, rtol=0, atol=close)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.precision)

    def _default_groups(self) -> int | None:
        """Draws of a training batch; few, where the batch needs statistics."""
        shapes = self.model.posterior.in_training().shapes().values()
        groups = self.method.groups(sum(math.prod(shape) for shape in shapes))
        return 1 if groups and self.adapts else groups

    def _evenly(self, groups: int | None) -> int | None:
        """Draws of a training batch, as many from each component that it is split over."""
        slices = self.method.slices
        return None if groups is None else slices * math.ceil(groups / slices)


def _can_have_rows(site: Site) -> bool:
    return site.name.rpartition(".")[2] == GATE or bool(NORM.search(site.kind))
