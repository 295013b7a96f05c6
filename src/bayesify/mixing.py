"""fit of a mixture: its parts, one after another, and a temperature for all of them."""

import glob
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.augmentation import Augment
from bayesify.ending import Ending
from bayesify.fit_result import FitResult
from bayesify.methods.mixture import Mixture, Parts, part_sites
from bayesify.mirror import worth_trying
from bayesify.posterior import key
from bayesify.replicas import private_copy
from bayesify.validation import collect, hold_out

if TYPE_CHECKING:
    from bayesify.model import BayesianModel


def fit_mixture(
    model: "BayesianModel",
    loader: Iterable[Any],
    *,
    validation: Iterable[Any] | None,
    checkpoint: str | Path | None,
    augment: str | Augment | None,
    temper: bool,
    mirror: bool | None,
    seed: int,
    **settings: Any,
) -> FitResult:
    """Fits each part as it would be fitted alone, into the mixture's own tensors.

    Args:
        model: The mixture.
        loader: Training data.
        validation: Held-out data; without it, every part holds out the same examples.
        checkpoint: Where progress is kept; every part but the first has a file beside it.
        augment: Of training images.
        temper: Whether the temperature is chosen at the end.
        mirror: Whether then draws may be mirrored; None: if the augmentation mirrors.
        seed: Of all parts.
        settings: More of `fit`.
    """
    method, posterior = model.method, model.posterior
    assert isinstance(method, Mixture)  # noqa: S101  (asked before)
    assert isinstance(posterior, Parts)  # noqa: S101  (made by it)
    held = hold_out(loader, seed)[1] if validation is None else collect(validation, seed)
    # Training data as they are would always ask for more confidence.
    telling = validation is not None or held.augmented
    ending = Ending(model, held, seed) if temper and telling else None
    results = []
    for index, part in enumerate(posterior.members()):
        alone = type(model)(
            private_copy(model.network),
            method.parts[index],
            part_sites(model.sites, index),
            model.likelihood,
            posterior=part,
        )
        part.noise = posterior.strengths["noise"][index].item()
        try:
            fitted = alone.fit(
                loader,
                validation=validation,
                checkpoint=None if checkpoint is None else part_file(checkpoint, index),
                augment=augment,
                temper=False,
                seed=seed,
                **settings,
            )
        finally:
            posterior.part_fitted(index)
        results.append(fitted)
    tempered = math.nan
    if ending is not None:
        shares_trunk = model.runner.shares_trunk
        found = ending.choose(mirror=worth_trying(mirror, augment, shares_trunk=shares_trunk))
        model.temperature = found.temperature
        tempered = nll = found.nll
    else:
        nll, _ = model.judge(held.batches, draws=method.draws, seed=key("judge", seed))
    return FitResult(
        steps=sum(result.steps for result in results),
        seconds=sum(result.seconds for result in results),
        kept=", ".join(result.kept for result in results),
        network_nll=results[0].network_nll,
        untrained_nll=math.nan,
        nll=nll,
        groups=None,
        history=[],
        temperature=model.temperature,
        tempered_nll=tempered,
        mirrored=model.mirrored,
        parts=tuple(results),
    )


def remove_checkpoint(path: Path) -> None:
    """Removes a fit's checkpoint, with those of a mixture's parts."""
    for file in path.parent.glob(f"{glob.escape(path.name)}.part*"):
        file.unlink()
    path.unlink(missing_ok=True)


def part_file(checkpoint: str | Path, index: int) -> Path:
    """Where the progress of a mixture's part is kept."""
    path = Path(checkpoint)
    return path.with_name(f"{path.name}.part{index}") if index else path
