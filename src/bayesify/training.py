"""fit: trains a posterior's own parameters and keeps the best state by held-out likelihood."""

import contextlib
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.augmentation import Augment, as_augment
from bayesify.batches import Inputs, labelled
from bayesify.checkpoint import Checkpoint
from bayesify.ending import Ending
from bayesify.errors import BayesifyWarning, DataError, NonFiniteError, SettingError
from bayesify.features import Features, NoFeaturesError
from bayesify.fit_result import FitResult, describe_groups
from bayesify.gradients import Gradients
from bayesify.heap import kept_heap
from bayesify.mirror import worth_trying
from bayesify.outliers import Outliers
from bayesify.posterior import key
from bayesify.validation import HeldOut, collect, hold_out, seeded

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

CACHE_BYTES = 2 << 30
PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class _Progress:
    """How far a fit is: what a checkpoint holds besides tensors."""

    step: int = 0
    seconds: float = 0.0
    kept: str = "untrained"
    best: float = math.inf
    nll: float = math.inf
    network_nll: float = math.inf
    untrained_nll: float = math.inf
    best_noise: float = 0.0
    best_temperature: float = 1.0
    solved: bool = False
    # Peaks of the optimizer's groups, which may follow from the weights that a fit begins with.
    rates: list[float] = field(default_factory=list)
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
        outliers: Outliers | None,
        num_examples: int | None,
        checkpoint: str | Path | None,
        checkpoint_seconds: float,
        seed: int,
        progress: bool,
        precision: str | None,
        groups: int | None,
        accumulate: int,
        validations: int,
        keep: str = "best",
        temper: bool = True,
        mirror: bool | None = None,
        cache: bool | str | Path = True,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        _check(precision, epochs=epochs, accumulate=accumulate, validations=validations)
        if groups is not None and groups < 1:
            raise SettingError(f"groups={groups} must be 1 or more, or None for the default.")
        if keep not in ("best", "last"):
            raise SettingError(f"keep={keep!r} must be 'best' or 'last'.")
        _check_cache(cache, cache_bytes)
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        self.model = model
        self.method = model.method
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        self.processes = PartialState(cpu=on_cpu)  # which does not find processes on CPUs itself
        self.augment = as_augment(augment)
        self.seed = seed
        self.outliers = outliers
        self.accumulate = accumulate
        self.keep = keep
        self.mirror = mirror
        self.cache, self.cache_bytes, self.cached = cache, cache_bytes, ""
        self.gradients = Gradients(model, outliers, groups, PRECISIONS[precision], seed)
        self.checkpoint = None if checkpoint is None else Checkpoint(Path(checkpoint))
        self.checkpoint_seconds = checkpoint_seconds
        self.show = progress and self.processes.is_main_process
        self.held: HeldOut
        if validation is None:
            self.loader, self.held = hold_out(loader, seed)
        else:
            self.loader, self.held = loader, collect(validation, seed)
        # Training data as they are would always ask for more confidence.
        telling = validation is not None or self.held.augmented
        self.temper = temper and self.method.tempers and telling
        self.tempered_nll = math.nan
        self.epochs = epochs
        self.steps_an_epoch = _steps(self.loader, num_examples)
        self.steps = epochs * self.steps_an_epoch
        self.examples = num_examples or _examples(self.loader, self.steps_an_epoch)
        self.every = max(1, self.steps // validations)
        components = self.method.components
        each = max(1, round(8 / components)) if model.posterior.shapes() else 1
        self.draws = components * each

    def run(self) -> FitResult:
        """Trains, and leaves the model in the best state found, whatever happens on the way."""
        model = self.model
        home, self.noise = model.device, model.noise
        self.best = self._snapshot()
        self.at = _Progress(best_noise=model.noise, best_temperature=model.temperature)
        model.to(self.processes.device if home.type == "cpu" else home)
        try:
            with kept_heap():
                self._train()
        finally:
            self._restore_best()
            model.to(home)
        if self.at.kept == "network" and model.posterior.varies():
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
            self.at.nll,
            self.gradients.groups,
            history,
            model.temperature,
            self.tempered_nll,
            self.cached,
            mirrored=model.mirrored,
        )

    def _train(self) -> None:
        model = self.model
        _warn_if_slow(self.gradients.precision, model.device)
        self.gradients.prepare()
        ending = Ending(model, self.held, self.seed) if self.temper else None
        self.optimizer = self.method.optimizer(model.posterior, self.examples)
        if self.optimizer is None:
            self.steps = 0
        elif own := list(model.likelihood.parameters()):
            self.optimizer.add_param_group({"params": own, "lr": 1e-2, "weight_decay": 0.0})
        if self.optimizer is not None:
            self.at.rates = [group["lr"] for group in self.optimizer.param_groups]
        resumed = self._resume()
        with self._features():
            if not resumed:
                if self.optimizer is not None:
                    self._check()
                self._first_validation()
            if self.optimizer is not None:
                self._descend(self.optimizer)
        if self.method.solves and not self.at.solved:
            self._solve()
        self._save()
        if ending is not None:
            self._choose_temperature(ending)

    @contextlib.contextmanager
    def _features(self) -> Iterator[None]:
        """Lets features take the place of inputs, and the network's rest that of the network."""
        begun = time.monotonic()
        features = self._kept_features()
        if features is None:
            yield
            return
        self.at.seconds += time.monotonic() - begun
        before = self.loader, self.held, self.model.runner
        self.loader, self.held, self.model.runner = features, features.held, features.rest
        self.gradients.prepare()
        try:
            yield
        finally:
            self.loader, self.held, self.model.runner = before
            features.close()

    def _kept_features(self) -> Features | None:
        """The trunk's outputs of all examples, where they can be kept; `cached` says what is."""
        try:
            self._require_constant_trunk()
            features = Features(
                self.gradients,
                self.loader,
                self.held,
                folder=None if isinstance(self.cache, bool) else Path(self.cache),
                limit=self.cache_bytes,
                seed=self.seed,
                show=self.show,
            )
        except NoFeaturesError as reason:
            self.cached = f"none: {reason}"
            return None
        self.cached = f"{features.bytes / 1e6:.1f} MB of features"
        return features

    def _require_constant_trunk(self) -> None:
        """Raises if the trunk's outputs are not the same in every epoch, or no epoch comes."""
        left, posterior = self.steps - self.at.step, self.model.posterior
        for reason, holds in (
            ("switched off", self.cache is False),
            ("no example is seen twice", left <= self.steps_an_epoch),
            ("inputs are augmented", self.augment is not None),
            ("there are outliers", self.outliers is not None),
            ("precision is mixed", self.gradients.precision is not None),
            ("running statistics adapt", bool(self.gradients.adapts)),
            ("there are several processes", self.processes.num_processes > 1),
            ("training has draws of its own", posterior.in_training() is not posterior),
        ):
            if holds:
                raise NoFeaturesError(reason)

    def _solve(self) -> None:
        """Computes what is not trained; where that is all, it is kept even if it does not help.

        Then the noise is 0, which is the network itself, and `calibrate` can still choose another.
        """
        at, begun = self.at, time.monotonic()
        with seeded(key("solve", self.seed), self.loader):
            self.method.solve(self.model, self._one_pass(), self.held.batches)
        at.seconds += time.monotonic() - begun
        self._validate(math.nan)
        if self.optimizer is None and at.kept != "solved":
            at.kept, at.best_noise, self.best = "network", 0.0, self._snapshot()
        at.solved = True

    def _choose_temperature(self, ending: Ending) -> None:
        """The temperature that held-out data asks for, of the state that is kept."""
        self._restore_best()
        shares_trunk = self.model.runner.shares_trunk
        mirror = worth_trying(self.mirror, self.augment, shares_trunk=shares_trunk)
        found = ending.choose(mirror=mirror)
        self.at.best_temperature = found.temperature
        self.tempered_nll = found.nll

    def _one_pass(self) -> Iterator[tuple[Inputs, Any]]:
        """The training batches, once."""
        from tqdm.auto import tqdm

        batches = islice(labelled(self.loader), self.steps_an_epoch)
        total, hidden = self.steps_an_epoch, not self.show
        yield from tqdm(batches, total=total, disable=hidden, desc="solve", unit="batch")

    def _descend(self, optimizer: torch.optim.Optimizer) -> None:
        """The training steps that are still to do."""
        from tqdm.auto import tqdm

        at = self.at
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = begun = time.monotonic() - at.seconds
        bar = tqdm(
            total=self.steps, initial=at.step, disable=not self.show, desc="fit", unit="step"
        )
        loss = math.nan
        with bar:
            for inputs, target in self._batches():
                factors = self.method.rates(at.step / self.steps)
                for index, (group, rate) in enumerate(
                    zip(optimizer.param_groups, at.rates, strict=True)
                ):
                    group["lr"] = rate * factors[min(index, len(factors) - 1)]
                loss = self._step(inputs, target, parameters, optimizer)
                at.step += 1
                self.method.after_step(self.model.posterior, at.step, self.steps)
                at.seconds = time.monotonic() - begun
                if at.step == 1:
                    bar.set_description(f"fit, {describe_groups(self.gradients.groups)}")
                bar.set_postfix(loss=f"{loss:.4f}", best_nll=f"{at.nll:.4f}", refresh=False)
                bar.update()
                near_end = 2 * (self.steps - at.step) < self.every
                if at.step == self.steps or (at.step % self.every == 0 and not near_end):
                    self._validate(loss)
                if time.monotonic() - saved > self.checkpoint_seconds:
                    saved = time.monotonic()
                    self._save()
        if not at.history or at.history[-1][0] != at.step:
            self._validate(loss)

    def _check(self) -> None:
        """Raises, before anything is done, if batches like the first do not suit the method."""
        if self.outliers is None and self.method.slices == 1:
            return
        with seeded(key("epoch", self.seed, 0), self.loader):
            inputs, target = next(labelled(self.loader))
        inputs.require_finite()
        if self.method.slices > len(inputs):
            raise SettingError(
                f"a batch of {len(inputs)} examples cannot be split over "
                f"{self.method.components} components. Use larger batches or fewer components."
            )
        if self.outliers is not None:
            self.outliers.check(inputs)
            self.gradients.try_outliers(inputs, torch.as_tensor(target))

    def _batches(self) -> Iterator[tuple[Inputs, Any]]:
        """The training batches that are still to do, in an order that only the seed decides."""
        done, skip = divmod(self.at.step, self.steps_an_epoch)
        for epoch in range(done, self.epochs):
            with seeded(key("epoch", self.seed, epoch), self.loader):
                batches = islice(labelled(self.loader), self.steps_an_epoch)
                yield from islice(batches, skip if epoch == done else 0, None)

    def _step(
        self,
        inputs: Inputs,
        target: Any,
        parameters: list[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> float:
        """One step on a batch: the gradients of its parts and rounds, summed over processes."""
        inputs.require_finite()
        step_seed = key("step", self.seed, self.at.step)
        if self.augment is not None:
            inputs = _augmented(inputs, self.augment, step_seed)
        size, rank, world = len(inputs), self.processes.process_index, self.processes.num_processes
        if self.gradients.adapts:
            rank, world = 0, 1  # statistics are of whole batches: every process runs all of them
        target = torch.as_tensor(target)
        parts = world * self.accumulate
        total = 0.0
        optimizer.zero_grad()
        for part in range(rank * self.accumulate, (rank + 1) * self.accumulate):
            mine = slice(part * size // parts, (part + 1) * size // parts)
            if mine.start < mine.stop:
                total += self.gradients.add(inputs, target, step_seed, mine)
        if rank == 0:
            total += self.gradients.add_penalty(self.at.step / self.steps, self.examples)
        if world > 1:
            total = self._reduce(parameters, total)
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss is {total} at step {self.at.step + 1}: training stopped, and the best "
                f"state so far was kept ({self.at.kept}). Lower the learning rate "
                f"({type(self.method).__name__}(lr={optimizer.param_groups[0]['lr'] / 10:.1g})), "
                f"or look for extreme inputs."
            )
        self.gradients.scaler.unscale_(optimizer)  # a hook may add to gradients
        self.gradients.scaler.step(optimizer)
        self.gradients.scaler.update()
        return total

    def _reduce(self, parameters: list[Tensor], total: float) -> float:
        """Sums gradients and loss over processes."""
        from accelerate.utils import reduce

        for parameter in parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(grad, "sum")
        summed: float = reduce(torch.tensor(total, device=self.model.device), "sum").item()
        return summed

    def _first_validation(self) -> None:
        """Judges the network itself and the untrained posterior, which training has to beat."""
        at, noise = self.at, self.model.noise
        self.model.estimate_noise(self.held.batches)
        self.model.noise = 0.0
        at.network_nll, accuracy, network = self._judge(draws=self.method.components)
        self.model.noise = noise
        at.untrained_nll, _, untrained = self._judge(draws=self.draws)
        if accuracy is not None and accuracy > 0.99:
            warnings.warn(
                f"the network is right on {accuracy:.1%} of the held-out examples: data that it "
                f"knows by heart say little about its uncertainty. Pass validation= with data it "
                f"has not seen.",
                BayesifyWarning,
                stacklevel=2,
            )
        at.best, at.kept, at.nll, at.best_noise = min(
            (network, "network", at.network_nll, 0.0),
            (untrained, "untrained", at.untrained_nll, noise),
        )
        self.best = self._snapshot()
        self._save()

    def _validate(self, loss: float) -> None:
        at = self.at
        nll, _, score = self._judge(draws=self.draws)
        at.history.append([at.step, loss, nll])
        if score < at.best or (self.keep == "last" and at.step == self.steps):
            at.best, at.nll = score, nll
            at.kept = f"step {at.step}" if at.step else "solved"
            at.best_noise, at.best_temperature = self.model.noise, self.model.temperature
            self.best = self._snapshot()
        self._save()

    def _judge(self, draws: int) -> tuple[float, float | None, float]:
        """Mean NLL and accuracy on held-out data, and what decides: NLL and loss on outliers.

        Always by the same draws, and outliers made in the same way: an attack is on the network as
        it is when it is judged.
        """
        seed = key("judge", self.seed)
        nll, accuracy = self.model.judge(self.held.batches, draws=draws, seed=seed)
        if self.outliers is None:
            return nll, accuracy, nll
        strange = [
            self.gradients.strange(inputs, torch.as_tensor(target), key("judge", self.seed, place))
            for place, (inputs, target) in enumerate(self.held.batches)
        ]
        doubts = [self.model.predict(x, draws=draws, seed=seed).epistemic for x in strange]
        each = torch.cat([doubt.reshape(len(doubt), -1).mean(1) for doubt in doubts])
        return nll, accuracy, nll + self.method.ood_loss(each).mean().item()

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _restore_best(self) -> None:
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(self.best[name])
        self.model.zero_grad()
        self.model.noise, self.model.temperature = self.at.best_noise, self.at.best_temperature

    def _save(self) -> None:
        if self.checkpoint is not None and self.processes.is_main_process:
            self.checkpoint.write(self._signature(), vars(self.at), *self._state())

    def _resume(self) -> bool:
        """Continues from the checkpoint, if it is there and belongs to this fit."""
        if self.checkpoint is None or not self.checkpoint.path.exists():
            return False
        progress = self.checkpoint.read(self._signature(), *self._state())
        vars(self.at).update(progress)
        return True

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], torch.optim.Optimizer | None]:
        """What is at work now, the best so far, and what the optimizer remembers."""
        return self.model.state_dict(), self.best, self.optimizer

    def _signature(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        return {
            "method": {"name": type(self.method).__name__, **self.method.to_dict()},
            "network": self.model.fingerprint(),
            "seed": self.seed,
            "steps": self.steps,
            "noise": self.noise,
        }


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


def _examples(loader: Iterable[Any], steps: int) -> int:
    """Training examples of an epoch, as well as can be told."""
    for rows in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(rows, Sized):
            return len(rows)
    return steps * (getattr(loader, "batch_size", None) or len(next(labelled(loader))[0]))


def _check_cache(cache: object, limit: object) -> None:
    if not isinstance(cache, bool | str | Path):
        raise SettingError(f"cache={cache!r} must be True, False or a folder.")
    if not isinstance(cache, bool) and not Path(cache).is_dir():
        raise SettingError(f"cache={str(cache)!r} is not a folder. Make it, or name another.")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise SettingError(
            f"cache_bytes={limit!r} must be a whole number, 1 or more; cache=False switches it off."
        )


def _warn_if_slow(precision: torch.dtype | None, device: torch.device) -> None:
    """Says so if the processor has no arithmetic for it: ResNet-20 took 15 times as long."""
    slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("NO AVX", "AVX2")
    if precision is not None and slow:
        warnings.warn(
            f"this processor cannot compute in {precision} itself, so that mixed precision takes "
            f"many times as long as full precision. Drop precision=.",
            BayesifyWarning,
            stacklevel=5,
        )


def _check(precision: str | None, **counts: int) -> None:
    if precision not in PRECISIONS:
        raise SettingError(f"precision={precision!r} must be None, 'bf16' or 'fp16'.")
    for name, count in counts.items():
        if count < 1:
            raise SettingError(f"{name}={count} must be 1 or more.")
