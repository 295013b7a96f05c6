"""fit: trains a posterior's own parameters and keeps the best state by held-out likelihood."""

import contextlib
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.augmentation import Augment, as_augment
from bayesify.batches import Inputs, labelled
from bayesify.errors import BayesifyWarning, DataError, NonFiniteError, SettingError
from bayesify.files import matches, read_tensors, write_tensors
from bayesify.posterior import Draws, fresh_normals, key
from bayesify.validation import HeldOut, collect, hold_out, seeded

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

GROUPS = 4
PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class FitResult:
    """What a fit did.

    Args:
        steps: Training steps done.
        seconds: Time taken, over all sessions of a resumed fit.
        kept: The state kept: "network" (noise 0), "untrained", or "step N".
        network_nll: Held-out NLL of the network itself.
        untrained_nll: Held-out NLL of the posterior before training.
        nll: Held-out NLL of the state kept.
        history: (step, training loss, held-out NLL), at each validation.
    """

    steps: int
    seconds: float
    kept: str
    network_nll: float
    untrained_nll: float
    nll: float
    history: list[tuple[int, float, float]] = field(repr=False)

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.seconds:.0f} s; held-out NLL: the network "
            f"{self.network_nll:.4f}, untrained {self.untrained_nll:.4f}, kept {self.nll:.4f} "
            f"({self.kept})"
        )


@dataclass
class _Progress:
    """How far a fit is: what a checkpoint holds besides tensors."""

    step: int = 0
    seconds: float = 0.0
    kept: str = "untrained"
    best: float = math.inf
    network_nll: float = math.inf
    untrained_nll: float = math.inf
    best_noise: float = 0.0
    history: list[list[float]] = field(default_factory=list)


class Fit:
    """One run of `fit`; see `BayesianModel.fit` for the arguments."""

    def __init__(
        self,
        model: "BayesianModel",
        loader: Iterable[Any],
        *,
        epochs: int,
        validation: Iterable[Any] | None,
        augment: str | Augment | None,
        num_examples: int | None,
        checkpoint: str | Path | None,
        checkpoint_seconds: float,
        seed: int,
        progress: bool,
        precision: str | None,
        groups: int | None,
        validations: int,
    ) -> None:
        _check(epochs=epochs, precision=precision, groups=groups, validations=validations)
        from accelerate import PartialState

        self.model = model
        self.method = model.method
        self.processes = PartialState()
        self.augment = as_augment(augment)
        self.seed = seed
        self.precision = PRECISIONS[precision]
        self.groups = groups
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_seconds = checkpoint_seconds
        self.show = progress and self.processes.is_main_process
        self.held: HeldOut
        if validation is None:
            self.loader, self.held = hold_out(loader, seed)
        else:
            self.loader, self.held = loader, collect(validation, seed)
        self.epochs = epochs
        self.steps_an_epoch = _steps(self.loader, num_examples)
        self.steps = epochs * self.steps_an_epoch
        self.every = max(1, self.steps // validations)
        self.draws = self.method.components * max(1, round(8 / self.method.components))

    def run(self) -> FitResult:
        """Trains, and leaves the model in the best state found, whatever happens on the way."""
        model = self.model
        home, self.noise = model.device, model.noise
        started = {name: value.clone() for name, value in model.trainable().items()}
        self.best, self.at = started, _Progress(best_noise=model.noise)
        model.to(self.processes.device if home.type == "cpu" else home)
        try:
            self._train()
        finally:
            self._restore_best()
            model.to(home)
        if self.at.kept == "network":
            warnings.warn(
                f"training did not help: held-out NLL is best for the network itself "
                f"({self.at.network_nll:.4f}), so it was kept and the noise set to 0. Calibrate on "
                f"held-out data, lower the learning rate, or train on more data.",
                BayesifyWarning,
                stacklevel=3,
            )
        history = [(int(step), loss, nll) for step, loss, nll in self.at.history]
        return FitResult(
            self.at.step,
            self.at.seconds,
            self.at.kept,
            self.at.network_nll,
            self.at.untrained_nll,
            self.at.best,
            history,
        )

    def _train(self) -> None:
        from tqdm.auto import tqdm

        model, at = self.model, self.at
        parameters = list(model.trainable().values())
        self.optimizer = self.method.optimizer(model.posterior)
        if own := list(model.likelihood.parameters()):
            self.optimizer.add_param_group({"params": own, "lr": 1e-2, "weight_decay": 0.0})
        self.scaler = torch.amp.GradScaler(
            model.device.type, enabled=self.precision is torch.float16
        )
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if not self._resume():
            self._first_validation()
        saved = begun = time.monotonic() - at.seconds
        bar = tqdm(
            total=self.steps, initial=at.step, disable=not self.show, desc="fit", unit="step"
        )
        loss = math.nan
        with bar:
            for inputs, target in self._batches():
                cosine = 0.5 * (1 + math.cos(math.pi * at.step / self.steps))
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * cosine
                loss = self._step(inputs, target, parameters)
                at.step += 1
                at.seconds = time.monotonic() - begun
                bar.set_postfix(loss=f"{loss:.4f}", best_nll=f"{at.best:.4f}", refresh=False)
                bar.update()
                if at.step % self.every == 0 or at.step == self.steps:
                    self._validate(loss)
                if time.monotonic() - saved > self.checkpoint_seconds:
                    saved = time.monotonic()
                    self._save()
        if not at.history or at.history[-1][0] != at.step:
            self._validate(loss)
        self._save()

    def _batches(self) -> Iterator[tuple[Inputs, Any]]:
        """The training batches that are still to do, in an order that only the seed decides."""
        done, skip = divmod(self.at.step, self.steps_an_epoch)
        for epoch in range(done, self.epochs):
            with seeded(key("epoch", self.seed, epoch), self.loader):
                batches = islice(labelled(self.loader), self.steps_an_epoch)
                yield from islice(batches, skip if epoch == done else 0, None)

    def _step(self, inputs: Inputs, target: Any, parameters: list[nn.Parameter]) -> float:
        """One step on a batch: its rounds' gradients, summed over processes."""
        inputs.require_finite()
        step_seed = key("step", self.seed, self.at.step)
        if self.augment is not None:
            inputs = _augmented(inputs, self.augment, step_seed)
        size, rank, world = len(inputs), self.processes.process_index, self.processes.num_processes
        mine = slice(rank * size // world, (rank + 1) * size // world)
        target = torch.as_tensor(target)[mine]
        inputs = inputs[mine].to(self.model.device)
        total = 0.0
        self.optimizer.zero_grad()
        for turn in range(self.method.rounds() if mine.start < mine.stop else 0):
            seed = key("round", step_seed, turn)
            with self._autocast():
                losses = self._losses(inputs, target, turn, seed, mine, size)
            loss = losses.sum() / size
            total += loss.item() / self.method.rounds()
            self.scaler.scale(loss).backward()
        if world > 1:
            from accelerate.utils import reduce

            for parameter in parameters:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(grad, "sum")
            total = reduce(torch.tensor(total, device=self.model.device), "sum").item()
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss is {total} at step {self.at.step + 1}: training stopped, and the best "
                f"state so far was kept ({self.at.kept}). Lower the learning rate "
                f"({type(self.method).__name__}(lr={self.method.to_dict().get('lr', 0) / 10:g})), "
                f"or look for extreme inputs."
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    def _losses(
        self, inputs: Inputs, target: Tensor, turn: int, seed: int, mine: slice, size: int
    ) -> Tensor:
        """Each example's loss; draws depend on its place in the whole batch of all processes."""
        model = self.model
        exemplar = self._is_exemplar(inputs)
        count = size if exemplar else min(self.groups or GROUPS, size)
        rows = mine if exemplar else slice(None)
        noise = fresh_normals(model.posterior.shapes(), seed=seed, count=count)
        noise = {name: value[rows].to(model.device) for name, value in noise.items()}
        component = self.method.component(turn, count)[rows].to(model.device)
        draws = model.posterior(component, noise)
        if exemplar:
            apart = inputs.map_batched(lambda t: t.unsqueeze(1))
            output = model.runner.paired(draws, apart).flatten(0, 1)
        else:
            output = self._by_groups(draws, inputs, count, mine, size)
        target = model.likelihood.target(target, output)
        weight = None
        if model.likelihood.kind == "classes":
            weight = self.method.class_weights(turn, output.shape[1], self.seed)
        return model.likelihood.loss(output, target, None if weight is None else weight.to(output))

    def _by_groups(
        self, draws: Draws, inputs: Inputs, count: int, mine: slice, size: int
    ) -> Tensor:
        outputs = []
        for g in range(count):
            first = max(mine.start, g * size // count) - mine.start
            last = min(mine.stop, (g + 1) * size // count) - mine.start
            if first < last:
                draw = {name: value[g] for name, value in draws.items()}
                outputs.append(self.model.runner.plain(draw, inputs[first:last]))
        return torch.cat(outputs)

    def _is_exemplar(self, inputs: Inputs) -> bool:
        """Whether every example gets a draw of its own: if the network can be vectorised so."""
        if not hasattr(self, "_exemplar"):
            with torch.no_grad():
                draws = self.model.posterior.draws(self.seed, [0, 1])
            self._exemplar = self.groups is None and self.model.runner.can_vectorise(
                draws, inputs, paired=True
            )
        return self._exemplar

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.precision)

    def _first_validation(self) -> None:
        """Judges the network itself and the untrained posterior, which training has to beat."""
        at, noise = self.at, self.model.noise
        self.model.estimate_noise(self.held.batches)
        self.model.noise = 0.0
        at.network_nll, accuracy = self._judge(draws=self.method.components)
        self.model.noise = noise
        at.untrained_nll, _ = self._judge(draws=self.draws)
        if accuracy is not None and accuracy > 0.99:
            warnings.warn(
                f"the network is right on {accuracy:.1%} of the held-out examples: data that it "
                f"knows by heart say little about its uncertainty. Pass validation= with data it "
                f"has not seen.",
                BayesifyWarning,
                stacklevel=2,
            )
        network_wins = at.network_nll < at.untrained_nll
        at.best, at.kept = min((at.network_nll, "network"), (at.untrained_nll, "untrained"))
        at.best_noise = 0.0 if network_wins else noise
        self.best = self._snapshot()
        self._save()

    def _validate(self, loss: float) -> None:
        at = self.at
        nll, _ = self._judge(draws=self.draws)
        at.history.append([at.step, loss, nll])
        if nll < at.best:
            at.best, at.kept, at.best_noise = nll, f"step {at.step}", self.model.noise
            self.best = self._snapshot()
        self._save()

    def _judge(self, draws: int) -> tuple[float, float | None]:
        """Mean NLL and accuracy on held-out data, always by the same draws."""
        return self.model.judge(self.held.batches, draws=draws, seed=key("judge", self.seed))

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.trainable().items()}

    def _restore_best(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.trainable().items():
                parameter.copy_(self.best[name])
                parameter.grad = None
        self.model.noise = self.at.best_noise

    # Checkpoints: one safetensors file with the state now, the best state and the optimizer's.

    def _signature(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        return {
            "method": {"name": type(self.method).__name__, **self.method.to_dict()},
            "network": self.model.fingerprint(),
            "seed": self.seed,
            "steps": self.steps,
            "noise": self.noise,
        }

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        state |= {f"now.{name}": value for name, value in self.model.trainable().items()}
        state |= {f"best.{name}": value for name, value in self.best.items()}
        momenta = self.optimizer.state_dict()["state"]
        for index, tensors in momenta.items():
            for name, value in tensors.items():
                state[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
        return state

    def _save(self) -> None:
        if self.checkpoint is not None and self.processes.is_main_process:
            metadata = {"signature": self._signature(), "progress": vars(self.at)}
            write_tensors(self.checkpoint, self._state(), metadata)

    def _resume(self) -> bool:
        """Continues from the checkpoint, if it is there and belongs to this fit."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        tensors, metadata = read_tensors(self.checkpoint)
        if not isinstance(metadata, dict) or metadata.get("signature") != self._signature():
            raise SettingError(
                f"checkpoint {self.checkpoint} is of another fit: network, method, seed or number "
                f"of steps differ. Delete it to start anew, or name another file."
            )
        momenta: dict[int, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("optimizer.")]:
            _, index, kind = name.split(".", 2)
            momenta.setdefault(int(index), {})[kind] = tensors.pop(name)
        matches(tensors, self._state(), self.checkpoint)
        with torch.no_grad():
            for name, parameter in self.model.trainable().items():
                parameter.copy_(tensors[f"now.{name}"])
        self.best = {name: tensors[f"best.{name}"] for name in self.best}
        state = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**state, "state": momenta})
        vars(self.at).update(metadata["progress"])
        return True


def _augmented(inputs: Inputs, augment: Augment, seed: int) -> Inputs:
    """Inputs whose first tensor is augmented."""
    first = inputs.tensors()[0]
    with seeded(seed):
        return inputs.map(lambda t: augment(t) if t is first else t)


def _steps(loader: Iterable[Any], num_examples: int | None) -> int:
    """Batches of an epoch."""
    if num_examples is not None:
        size = getattr(loader, "batch_size", None) or len(next(labelled(loader))[0])
        return max(1, math.ceil(num_examples / size))
    try:
        steps = len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            "the loader has no length, which the learning rate's schedule needs. Pass "
            "num_examples=, the number of examples of an epoch."
        ) from None
    if steps < 1:
        raise DataError("the loader is empty: it yields no batch. Check drop_last.")
    return steps


def _check(*, epochs: int, precision: str | None, groups: int | None, validations: int) -> None:
    if epochs < 1:
        raise SettingError(f"epochs={epochs} must be 1 or more.")
    if precision not in PRECISIONS:
        raise SettingError(f"precision={precision!r} must be None, 'bf16' or 'fp16'.")
    if groups is not None and groups < 1:
        raise SettingError(f"groups={groups} must be 1 or more, or None for a draw an example.")
    if validations < 1:
        raise SettingError(f"validations={validations} must be 1 or more.")
