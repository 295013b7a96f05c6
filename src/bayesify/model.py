"""BayesianModel: what ties network, posterior and likelihood together."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.adaptive import Adaptive, check_tolerance
from bayesify.augmentation import Augment
from bayesify.batches import Inputs, as_inputs, is_loader, split_batch
from bayesify.calibration import Calibration, Search
from bayesify.choice import Choice
from bayesify.errors import DataError, SettingError, WrongNetworkError
from bayesify.files import fingerprint
from bayesify.fit_result import FitResult
from bayesify.likelihood import Averages, Likelihood, Regression, as_likelihood
from bayesify.methods import Method, Mixture
from bayesify.mirror import MIRROR, add_mirror, mirrored
from bayesify.outliers import Normalisation, Outliers
from bayesify.plan import plan
from bayesify.posterior import Draws, Posterior
from bayesify.prediction import Prediction
from bayesify.replicas import private_copy
from bayesify.sampling import STRATEGIES, Runner
from bayesify.sites import Site, Where, find_statistics, named_tensors
from bayesify.training import CACHE_BYTES, Fit

if TYPE_CHECKING:
    from bayesify.evaluation.report import Report


def convert(
    model: nn.Module,
    method: Method | None = None,
    *,
    likelihood: str | Likelihood = "classification",
    where: Where = None,
    example: Any = None,
    validation: Iterable[Any] | None = None,
    training: Iterable[Any] | None = None,
    seed: int = 0,
) -> "BayesianModel":
    """Makes a trained network Bayesian. The network itself is left as it is.

    Args:
        model: A trained network of any architecture.
        method: What becomes random and how; `ABNN()` by default.
        likelihood: "classification", "binary", "multilabel", "regression", or a `Likelihood`.
        where: Which sites: a glob or globs over tensor names, the number of last sites, a
            fraction of them, or a predicate on the name; all by default. "auto" chooses by held-out
            likelihood how many of the last layers, the fewest that do: see `bayesify.choosing`. It
            chooses sites and nothing else: fit and calibrate as ever. `BayesianModel.choice` says
            what it tried.
        example: Inputs by which the execution order of the sites is learned, for `where=k`.
        validation: For "auto": data that the network has not seen; the first 2,000 examples count.
        training: For "auto", where there is no such data: what the network was trained on. A tenth
            of it decides, as in `fit`: images under strong augmentation.
        seed: For "auto": one seed, one choice.

    Raises:
        NothingToRandomiseError: If the network has nothing the method could make random.
        UnknownSiteError: If `where` matches nothing.
        UnsupportedNetworkError: If the network cannot be copied.
        SettingError: If `where="auto"` has no data, or anything else has some.

    Example:
        >>> from bayesify import ABNN
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> bnn = convert(network, ABNN(noise=0.2))
        >>> bnn.predict(torch.zeros(5, 4)).probs.shape
        torch.Size([5, 3])
    """
    if isinstance(where, str) and where == "auto":
        from bayesify.choosing import choose

        choice = choose(
            model,
            method,
            likelihood=likelihood,
            validation=validation,
            training=training,
            seed=seed,
        )
        chosen = convert(model, method, likelihood=likelihood, where=set(choice.sites).__contains__)
        chosen.choice = choice
        return chosen
    if validation is not None or training is not None:
        raise SettingError(
            f"validation= and training= are for where='auto', and where={where!r}: leave them to "
            f"`fit` and `calibrate`."
        )
    planned = plan(model, method, where=where, example=example)
    return BayesianModel(
        planned.network,
        planned.method,
        planned.sites,
        copy.deepcopy(as_likelihood(likelihood)),
        shares_trunk=planned.shares_trunk,
    )


class BayesianModel(nn.Module):
    """A network plus a distribution over some of its tensors. Made by `convert` or `load`.

    Its parameters are the posterior's (and the likelihood's noise level); the network is a private
    copy in eval mode, which nothing that is done to this object changes in the original.

    Args:
        network: A private copy of the network, with the gates that the method needs.
        method: The method.
        sites: What is random.
        likelihood: What the output means.
        shares_trunk: Whether layers stand before the first random one.
        posterior: The distribution, if it is there already; otherwise the method makes it.

    Attributes:
        choice: What `where="auto"` tried, if it chose the sites.
    """

    network: nn.Module

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        sites: Sequence[Site],
        likelihood: Likelihood,
        *,
        shares_trunk: bool = False,
        posterior: Posterior | None = None,
    ) -> None:
        super().__init__()
        # Not a submodule: its tensors are neither parameters nor state of this module.
        object.__setattr__(self, "network", network)
        self.method = method
        self.sites = tuple(sites)
        self.likelihood = likelihood
        if posterior is None:
            posterior = method.posterior(sites, named_tensors(network))
            if method.adapts_statistics:
                posterior.adopt_statistics(find_statistics(network, sites))
        self.posterior = posterior
        if isinstance(likelihood, Regression):
            likelihood.to(next(network.parameters()))
        self.temperature, self.slope = 1.0, 0.0
        self._mirrored = False
        self.choice: Choice | None = None
        self._shares_trunk = shares_trunk
        self._fingerprint: str | None = None
        self._network_changed()

    # What it is

    @property
    def noise(self) -> float:
        """The factor on the posterior's standard deviation."""
        return self.posterior.noise

    @noise.setter
    def noise(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise SettingError(f"noise={value!r} must be a finite number, 0 or more.")
        self.posterior.noise = float(value)

    @property
    def mirrored(self) -> bool:
        """Whether every second draw of a component sees images mirrored: see `bayesify.mirror`.

        `fit` finds out whether it should be, where all of the network is random. For networks with
        one output for an image: outputs are not mirrored back. Without noise no draw is mirrored.
        """
        return self._mirrored

    @mirrored.setter
    def mirrored(self, value: bool) -> None:
        if value and MIRROR not in self.network._buffers:
            self._require_unchanged()
            add_mirror(self.network)
            self._network_changed()
        self._mirrored = value

    @property
    def strategy(self) -> str:
        """How draws run; all ways give the same to rounding.

        "looped" calls the network for one draw after another, "vectorised" for all at once.
        "folded" and "stacked" do so with its tape: see `bayesify.tape`. "auto", the default, takes
        what is fastest, measured once for each shape of input. "compiled" is "folded" by
        `torch.compile`, which takes seconds to minutes for each shape and is never taken unasked.
        """
        return self.runner.strategy

    @strategy.setter
    def strategy(self, value: str) -> None:
        if value not in ("auto", *STRATEGIES):
            raise SettingError(f"strategy={value!r} must be one of auto, {', '.join(STRATEGIES)}.")
        self.runner.strategy = value

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.network.parameters()).device

    def trainable(self) -> dict[str, nn.Parameter]:
        """All that `fit` trains, by name."""
        return dict(self.named_parameters())

    def fingerprint(self) -> str:
        """A hash of the network's weights, as they were when it was converted."""
        if self._fingerprint is None:
            self._require_unchanged()
            self._fingerprint = fingerprint(self.network)
        return self._fingerprint

    def extra_repr(self) -> str:
        """Method, noise and temperature."""
        slope = f", slope={self.slope:g}" if self.slope else ""
        network = type(self.network).__name__
        return (
            f"{network}, {len(self.sites)} random tensors, {self.method}, noise={self.noise:g}, "
            f"temperature={self.temperature:g}{slope}{', mirrored' if self.mirrored else ''}"
        )

    # What it does

    def forward(self, x: Any, *, draws: int | None = None, seed: int = 0) -> Tensor:
        """The predictive log-probabilities, or mean, differentiable in inputs and parameters."""
        self._require_unchanged()
        inputs = as_inputs(x).to(self.device)
        outputs = torch.cat(list(self.outputs(inputs, draws=draws, seed=seed)))
        return self.likelihood.predictive(outputs, self.temperature, self.slope)

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int | None = None,
        validation: Iterable[Any] | None = None,
        augment: str | Augment | None = None,
        ood: Iterable[Any] | None = None,
        num_examples: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_seconds: float = 60.0,
        seed: int = 0,
        progress: bool = True,
        precision: str | None = None,
        groups: int | None = None,
        accumulate: int = 1,
        validations: int | None = None,
        keep: str = "best",
        temper: bool = True,
        mirror: bool | None = None,
        normalisation: Normalisation | None = None,
        cache: bool | str | Path = True,
        cache_bytes: int = CACHE_BYTES,
    ) -> FitResult:
        """Trains the posterior's own parameters and keeps the best state by held-out likelihood.

        Ends no worse there than the untrained posterior and than the network itself. Running
        statistics of the network stay as they are in the checkpoint unless the method adapts them.

        Args:
            loader: Batches of inputs and target, or dicts.
            epochs: Passes over the data; every member sees every example in each. By default the
                method's own number.
            validation: Held-out data. Without it, a tenth of the training data is held out and,
                if it is images, judged under strong augmentation.
            augment: "crop-flip", "strong", or a function of a batch of inputs.
            ood: Data of other kinds, for methods that train on them.
            num_examples: Length of an epoch, for loaders that do not know it.
            checkpoint: File to write progress into, and to continue from if it is there.
            checkpoint_seconds: How often it is written, besides at each validation.
            seed: Decides order, augmentation and noise: one seed, one result.
            progress: Shows a progress bar.
            precision: "bf16" or "fp16" runs the network in mixed precision.
            groups: Draws a batch, each for its part of it. By default the method chooses: a draw
                for every example where that is cheap and the network can be vectorised so.
            accumulate: Runs a batch in that many parts, with the same result and less memory; where
                statistics adapt, each part has its own, and the result is another.
            validations: How often held-out data is looked at, by default the method's own number.
            keep: "best", or "last": the state when training is over, whatever held-out data says.
            temper: Whether the temperature is chosen at the end, by the same held-out data, if
                they can tell: data of `validation`, or images; see `bayesify.ending`.
            mirror: Whether mirrored images show the same things; None: if `augment` is "crop-flip",
                which says so. Then, with `temper`, half of the draws see them mirrored from now on
                if held-out data are likelier so: see `mirrored`.
            normalisation: Mean and standard deviation of each channel by which images were
                normalised, for methods that add noise in pixel units.
            cache: Whether, where only late layers train for several epochs and inputs stay as they
                are, what stands before runs once for each example and its outputs are kept in a
                temporary file; or the folder for that. `FitResult.cache` says what became of it.
            cache_bytes: What that file may take at most; beyond that there is none.

        Raises:
            DataError: If the data cannot be used.
            NonFiniteError: If the loss stops being finite; the best state so far is kept.
        """
        settings: dict[str, Any] = {
            "validation": validation,
            "augment": augment,
            "num_examples": num_examples,
            "checkpoint": checkpoint,
            "checkpoint_seconds": checkpoint_seconds,
            "seed": seed,
            "progress": progress,
            "precision": precision,
            "groups": groups,
            "accumulate": accumulate,
            "keep": keep,
            "temper": temper,
            "mirror": mirror,
            "cache": cache,
            "cache_bytes": cache_bytes,
        }
        if ood is not None and not self.method.takes_ood:
            raise SettingError(
                f"{type(self.method).__name__} does not train on OOD data: drop ood=."
            )
        self._require_unchanged()
        if isinstance(self.method, Mixture):
            from bayesify.mixing import fit_mixture

            settings |= {"epochs": epochs, "validations": validations}
            return fit_mixture(self, loader, normalisation=normalisation, **settings)
        radius = self.method.noise_radius()
        outliers = None
        if ood is not None or radius:
            outliers = Outliers(radius, ood, normalisation, self.method.noise_steps())
        return Fit(
            self,
            loader,
            epochs=self.method.epochs if epochs is None else epochs,
            validations=self.method.validations if validations is None else validations,
            outliers=outliers,
            **settings,
        ).run()

    def calibrate(
        self, loader: Iterable[Any], *, draws: int | None = None, seed: int = 0
    ) -> Calibration:
        """Chooses noise, temperature and slope by held-out likelihood, and sets them.

        The noise explains what it can, and a temperature what is left: the noise that is likeliest
        without one, unless another is clearly likelier with one. The slope says how the temperature
        rises or falls with doubt. See `bayesify.calibration`.

        Args:
            loader: Data that neither network nor `fit` has seen; the first 3,000 examples count,
                of which the first 500 are for the search.
            draws: Draws of a prediction; should be what will be used later.
            seed: Seed of the draws.
        """
        chosen = Search(self, loader, self._draws(draws), seed).run()
        self.noise, self.temperature, self.slope = chosen.noise, chosen.temperature, chosen.slope
        return chosen

    def predict(
        self,
        x: Any,
        *,
        draws: int | None = None,
        seed: int = 0,
        keep_draws: bool = False,
        tolerance: float | None = None,
        batch_size: int | None = None,
        memory_budget: int | None = None,
    ) -> Prediction:
        """Predicts, with the doubt split into the data's and the model's own.

        Args:
            x: A tensor, a tuple of arguments, a dict of keywords, or a loader of these, whose
                tuples end with a target that is not looked at.
            draws: How many draws to average; the method's default otherwise.
            seed: Which draws: the same seed gives the same functions, for all inputs.
            keep_draws: Keeps each draw's probabilities or means.
            tolerance: Lets easy examples stop before all `draws`, when their probabilities are
                likely to be within this of what all would give (regression: the mean, in units of
                the predictive standard deviation); `Prediction.used` says when. Likely, not sure:
                of CIFAR-10 test images and of SVHN 99.5 % or more were, at 0.01 to 0.1, those
                that took all draws among them. See `bayesify.adaptive`.
            batch_size: Examples that run at once; by default what memory allows, at most 256.
            memory_budget: Bytes that running may take beyond the network; 1 GiB by default.

        Raises:
            DataError: If the inputs are empty, not finite, or of a shape the network cannot take.
            NonFiniteError: If the network gives NaN.
        """
        self._require_unchanged()
        count = self._draws(draws)
        if batch_size is not None and batch_size < 1:
            raise SettingError(f"batch_size={batch_size} must be 1 or more.")
        if tolerance is not None:
            check_tolerance(tolerance, keep_draws=keep_draws)
        elif self.noise == 0 and not keep_draws:
            count = self.method.components  # without noise a component's draws are all alike
        with torch.no_grad():
            drawn = self.draws(seed, range(count))

            def parts(inputs: Inputs) -> Iterator[Prediction]:
                inputs.require_finite()
                first = inputs[:1].to(self.device)
                size = batch_size or self.runner.batch_size(
                    drawn, first, memory_budget, examples=len(inputs)
                )
                if tolerance is not None:
                    yield Adaptive(self, drawn, tolerance, memory_budget).predict(inputs, size)
                    return
                for part in inputs.split(size):
                    outputs = self.runner.outputs(
                        drawn, part.to(self.device), memory_budget=memory_budget
                    )
                    yield self._summarise(outputs, keep_draws)

            if not is_loader(x):
                return Prediction.cat(list(parts(as_inputs(x))))
            predictions = [p.to("cpu") for batch in x for p in parts(split_batch(batch)[0])]
        if not predictions:
            raise DataError("the loader is empty: it yields no batch to predict.")
        return Prediction.cat(predictions)

    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        ood: dict[str, Iterable[Any]] | None = None,
        draws: int | None = None,
        seed: int = 0,
        score: str = "uncertainty",
    ) -> "Report":
        """Measures accuracy and calibration, and how well other data is told apart.

        Args:
            loader: Test data.
            ood: Data of other kinds, by name.
            draws: Draws of a prediction.
            seed: Seed of the draws.
            score: What tells them apart: "uncertainty" (total), "aleatoric", "epistemic" or
                "confidence".
        """
        from bayesify.evaluation.report import evaluate

        return evaluate(self, loader, ood=ood, draws=draws, seed=seed, score=score)

    def sample(self, seed: int = 0, index: int = 0) -> nn.Module:
        """An ordinary network of its own, in eval mode, with one draw baked in."""
        self._require_unchanged()
        network = private_copy(self.network, share=False)
        with torch.no_grad():
            draw = {name: value[0] for name, value in self.draws(seed, [index]).items()}
            for name, value in {**self.posterior.shared(), **draw}.items():
                for place in self.runner.slots[name]:
                    path, _, attribute = place.rpartition(".")
                    module = network.get_submodule(path)
                    getattr(module, attribute).copy_(value)
                    # A gate now holds part of the draw, and belongs into its state_dict.
                    module._non_persistent_buffers_set.discard(attribute)
        return network

    def save(self, path: str | Path) -> None:
        """Writes the posterior and its settings into a folder, atomically. See `bayesify.load`."""
        from bayesify.io import save

        save(self, path)

    # What fit, calibrate and evaluate are made of

    def draws(self, seed: int, indices: Sequence[int]) -> Draws:
        """The draws `indices` of a seed, stacked: all that takes the place of the network's own."""
        drawn = self.posterior.draws(seed, indices)
        if self.mirrored and self.noise > 0:
            drawn[MIRROR] = mirrored(indices, self.posterior.components, self.device)
        return drawn

    def outputs(
        self, inputs: Inputs, *, draws: int | None = None, seed: int = 0
    ) -> Iterator[Tensor]:
        """Outputs of consecutive draws, stacked, before the temperature."""
        drawn = self.draws(seed, range(self._draws(draws)))
        return self.runner.outputs(drawn, inputs)

    def pool(self, averages: Averages) -> Averages:
        """The prediction that averaged statistics make, at the model's temperature."""
        return self.likelihood.pool(averages, self.temperature, self.slope)

    def judge(
        self, batches: Iterable[tuple[Inputs, Any]], *, draws: int, seed: int
    ) -> tuple[float, float | None]:
        """Mean NLL of labelled batches and, for classes, accuracy; see `losses`."""
        losses, hits = self.losses(batches, draws=draws, seed=seed)
        return losses.mean().item(), None if hits is None else hits.mean().item()

    def losses(
        self, batches: Iterable[tuple[Inputs, Any]], *, draws: int, seed: int
    ) -> tuple[Tensor, Tensor | None]:
        """NLL of each example of labelled batches and, for classes, whether the label is right.

        The same to the last bit each time, so that a fit can be repeated: with the strategy "auto"
        draws run folded, whatever is fastest.
        """
        losses, hits = [], []
        before = self.strategy
        self.strategy = "folded" if before == "auto" else before
        try:
            for inputs, target in batches:
                prediction = self.predict(inputs, draws=draws, seed=seed)
                wanted = self.target_for(prediction, target)
                losses.append(self.likelihood.nll(prediction.averages, wanted))
                if self.likelihood.kind == "classes":
                    hits.append((prediction.label == wanted).float().flatten())
        finally:
            self.strategy = before
        return torch.cat(losses), torch.cat(hits) if hits else None

    def target_for(self, prediction: Prediction, target: Any) -> Tensor:
        """A target checked against a prediction, and brought into form."""
        values = prediction.kind == "values"
        output = prediction.mean.unsqueeze(1) if values else prediction.probs
        return self.likelihood.target(target, output)

    def estimate_noise(self, batches: Iterable[tuple[Inputs, Any]]) -> None:
        """Sets a regression's noise level to the network's own error, where it is to be learned."""
        level = getattr(self.likelihood, "log_variance", None)
        if level is None or level.item() != 0:
            return
        noise, self.noise = self.noise, 0.0
        squares = []
        try:
            with torch.no_grad():
                for inputs, target in batches:
                    prediction = self.predict(inputs, draws=self.method.components)
                    wanted = self.target_for(prediction, target)
                    squares.append((prediction.mean - wanted).square().flatten())
                level.copy_(torch.cat(squares).mean().clamp_min(1e-12).log())
        finally:
            self.noise = noise

    # The private network

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BayesianModel":
        self.fingerprint()  # of the weights as they came, before they are moved or cast
        super()._apply(fn, recurse)
        self.network._apply(fn)
        self._network_changed()
        return self

    def train(self, mode: bool = True) -> "BayesianModel":
        """Nothing here behaves otherwise in training: the network stays in eval mode."""
        self.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "BayesianModel":
        other = BayesianModel(
            private_copy(self.network),
            self.method,
            self.sites,
            copy.deepcopy(self.likelihood, memo),
            shares_trunk=self._shares_trunk,
        )
        other.load_state_dict(self.state_dict())
        other.noise, other.temperature, other.slope = self.noise, self.temperature, self.slope
        other.mirrored = self.mirrored
        other.strategy, other._fingerprint = self.strategy, self._fingerprint
        other.choice = self.choice
        return other

    def _network_changed(self) -> None:
        strategy = self.strategy if hasattr(self, "runner") else "auto"
        self.runner = Runner(
            self.network,
            self.likelihood.read,
            self.posterior.shared,
            shares_trunk=self._shares_trunk,
            strategy=strategy,
        )
        self._weights = [p for p in self.network.parameters() if not p.is_inference()]
        self._versions = self._weight_versions()

    def _weight_versions(self) -> int:
        return sum(weight._version for weight in self._weights)

    def _require_unchanged(self) -> None:
        if self._weight_versions() != self._versions:
            raise WrongNetworkError(
                "the original network's weights were changed in place after it was converted, and "
                "bayesify shares them. Convert it again, or convert copy.deepcopy(model) if you go "
                "on training it."
            )

    def _draws(self, draws: int | None) -> int:
        return self.method.draws if draws is None else self.method.check_draws(draws)

    def _summarise(self, outputs: Iterable[Tensor], keep_draws: bool) -> Prediction:
        """Averages statistics over draws as they come."""
        sums: Averages = {}
        kept = []
        count = 0
        for output in outputs:
            count += len(output)
            statistics = self.likelihood.statistics(output)
            for name, value in statistics.items():
                total = value.sum(0)
                sums[name] = sums[name] + total if name in sums else total
            for draw in range(len(output)) if keep_draws else ():
                alone = {name: value[draw] for name, value in statistics.items()}
                kept.append(self.pool(alone))
        pooled = self.pool({name: total / count for name, total in sums.items()})
        kept_draws = torch.stack([next(iter(one.values())) for one in kept]) if kept else None
        return Prediction(self.likelihood.kind, pooled, kept_draws).require_finite()
