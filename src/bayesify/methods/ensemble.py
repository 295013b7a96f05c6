r"""Deep ensemble: several networks of one architecture, averaged.

Lakshminarayanan, Pritzel and Blundell, *Simple and Scalable Predictive Uncertainty Estimation using
Deep Ensembles*, NeurIPS 2017 (https://arxiv.org/abs/1612.01474).

$$p(y | x) = \frac{1}{M} \sum_m p(y | x, w_m)$$

The members are networks that the user trained apart, as in the paper (`checkpoints`), each with its
own running statistics; or M copies of one network that train on from it. Those would stay
alike, so that each sees its own bootstrap of every batch: as many examples, drawn with replacement.
They differ less than networks trained apart, which nothing short of training apart replaces.

`noise` is a factor on the members' distance from their mean, $\bar w + noise (w_m - \bar w)$: 1 is
the ensemble, 0 one network, that of the averaged weights.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesify.errors import SettingError, WrongNetworkError
from bayesify.files import read_tensors
from bayesify.methods.method import Method, nesterov
from bayesify.posterior import Draws, NamedTensors, Posterior, key
from bayesify.sites import Site, Skipped, find_parameters, named_tensors, slots

Checkpoint = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class DeepEnsemble(Method):
    """Members with all weights of their own, from checkpoints or fine-tuned from one.

    Args:
        members: M; where there are checkpoints, their number.
        checkpoints: Networks, state dicts or .safetensors files, one a member. They are the
            ensemble as it is: `fit` trains nothing. With none, `fit` trains copies of the network.
        noise: A factor on the members' distance from their mean.
        draws: Draws of a prediction: draw i is member i mod M, so that M, the default, say all.
        lr: Peak learning rate (SGD, Nesterov momentum 0.9, cosine).
        weight_decay: Of all weights.

    Example:
        >>> DeepEnsemble(members=5).draws
        5
        >>> DeepEnsemble(checkpoints=[nn.Linear(2, 3), nn.Linear(2, 3)]).members
        2
    """

    members: int = 3
    checkpoints: Sequence[Checkpoint] = field(default=(), repr=False, compare=False)
    noise: float = 1.0
    draws: int = 0
    lr: float = 3e-4  # statistics do not follow the weights: on ResNet-20, 1e-2 diverged at once
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", _read(self.checkpoints))
        if self.checkpoints:
            if self.members not in (len(self.checkpoints), type(self).members):
                raise SettingError(
                    f"members={self.members!r} contradicts the {len(self.checkpoints)} "
                    f"checkpoints: every one is a member, so drop members=."
                )
            object.__setattr__(self, "members", len(self.checkpoints))
        self.check_count("members")
        self.check_numbers("lr", "weight_decay")
        if self.draws == 0:
            object.__setattr__(self, "draws", self.members)
        super().__post_init__()

    @property
    def components(self) -> int:
        """The members."""
        return self.members

    @property
    def states(self) -> tuple[Mapping[str, Tensor], ...]:
        """The checkpoints' tensors, by name."""
        return cast("tuple[Mapping[str, Tensor], ...]", self.checkpoints)  # read when it was made

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """Every weight and bias, and the running statistics that belong to them.

        Raises:
            WrongNetworkError: If a checkpoint is of another network.
        """
        sites, skipped = _find_state(network)
        known = {**named_tensors(network), **network.state_dict()}
        for index, state in enumerate(self.states):
            _require_same(state, {site.name for site in sites}, known, f"checkpoints[{index}]")
        return sites, skipped

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """The members, of the checkpoints or all at the network's values."""
        states = self.states or [tensors] * self.members
        return Ensemble(sites, tensors, states, self.noise, trainable=not self.states)

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer | None:  # noqa: ARG002
        """All members' weights; nothing, where they are of checkpoints."""
        if self.checkpoints:
            return None
        return nesterov(posterior.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def groups(self, numbers: int) -> int:  # noqa: ARG002
        """A member runs a batch whole: nothing in it is random."""
        return 1

    def rounds(self) -> int:
        """Every member sees every batch."""
        return self.members

    def example_weights(self, turn: int, count: int, seed: int) -> Tensor:
        """How often a member draws each example, of `count` draws with replacement."""
        generator = torch.Generator().manual_seed(key("bootstrap", seed, turn))
        return torch.randint(count, (count,), generator=generator).bincount(minlength=count)

    def to_dict(self) -> dict[str, Any]:
        """The settings, for JSON; checkpoints are tensors, and stored with the posterior's."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "checkpoints": ()}


class Ensemble(Posterior):
    """Members that are equally likely: tensor = mean + noise (w_m - mean), and no random numbers.

    Statistics, which are not weights, go no further from their mean than the members' own: a
    variance has to stay positive.

    Args:
        sites: The members' tensors.
        tensors: The network's tensors, by name.
        states: Each member's tensors, by name, as type and device of the network's.
        noise: A factor on the members' distance from their mean.
        trainable: Whether the members' weights train.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        tensors: Mapping[str, Tensor],
        states: Sequence[Mapping[str, Tensor]],
        noise: float,
        *,
        trainable: bool,
    ) -> None:
        super().__init__()
        self.components = len(states)
        self.noise = noise
        weights: dict[str, Tensor] = {}
        running: dict[str, Tensor] = {}
        for site in sites:
            like = tensors[site.name]
            stack = torch.stack([state[site.name].detach().to(like) for state in states])
            (weights if isinstance(like, nn.Parameter) else running)[site.name] = stack
        self.weights = NamedTensors(weights, trainable=trainable)
        self.running = NamedTensors(running, trainable=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """None."""
        return {}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """The members asked for."""
        weights = {n: _spread(v, self.noise)[component] for n, v in self.weights.items()}
        running = {n: _spread(v, min(1.0, self.noise))[component] for n, v in self.running.items()}
        return {**weights, **running}


def _spread(members: Tensor, noise: float) -> Tensor:
    """Members `[M, ...]` at `noise` times their distance from their mean."""
    if noise == 1:
        return members
    # Summed as differences from the first, so that the mean of members that are alike is exact.
    mean = members[0] + (members - members[0]).mean(0)
    return mean + noise * (members - mean)


def _find_state(network: nn.Module) -> tuple[list[Site], list[Skipped]]:
    """Parameters and stored buffers that hold real numbers, layer by layer."""
    parameters, skipped = find_parameters(network)
    found = {site.name: site for site in parameters}
    stored = network.state_dict()
    for name, buffer in network.named_buffers():
        if name in stored and buffer.is_floating_point():
            kind = type(network.get_submodule(name.rpartition(".")[0])).__name__
            found[name] = Site(name, tuple(buffer.shape), kind)
    return [found[name] for name in slots(network) if name in found], skipped


def _read(checkpoints: Any) -> tuple[Mapping[str, Tensor], ...]:
    """Checkpoints of any kind as tensors by name."""
    one = isinstance(checkpoints, nn.Module | Mapping | str | os.PathLike)
    if one or not isinstance(checkpoints, Iterable):
        raise SettingError(
            f"checkpoints must be a list, one entry a member, and is a "
            f"{type(checkpoints).__name__}: write checkpoints=[...]."
        )
    return tuple(_read_one(index, checkpoint) for index, checkpoint in enumerate(checkpoints))


def _read_one(index: int, checkpoint: Any) -> Mapping[str, Tensor]:
    if isinstance(checkpoint, nn.Module):
        return named_tensors(checkpoint)
    if isinstance(checkpoint, Mapping):
        if all(isinstance(value, Tensor) for value in checkpoint.values()):
            return checkpoint
        other = next(name for name, value in checkpoint.items() if not isinstance(value, Tensor))
        raise SettingError(
            f"checkpoints[{index}] is no state dict: {other!r} is a "
            f"{type(checkpoint[other]).__name__} and not a tensor. Pass the state dict alone, "
            f"which training scripts often keep as checkpoint['state_dict'] or ['model']."
        )
    if isinstance(checkpoint, str | os.PathLike):
        path = Path(checkpoint)
        if path.suffix != ".safetensors":
            raise SettingError(
                f"checkpoints[{index}]={str(path)!r} is not a .safetensors file, and files of "
                f"other kinds may run code when they are read. Pass its state dict: "
                f"torch.load({str(path)!r}, weights_only=True)."
            )
        return read_tensors(path)[0]
    raise SettingError(
        f"checkpoints[{index}] is a {type(checkpoint).__name__}, and must be a network, a state "
        f"dict or the path of a .safetensors file."
    )


def _require_same(
    state: Mapping[str, Tensor], needed: set[str], known: Mapping[str, Tensor], which: str
) -> None:
    """Raises if a checkpoint lacks a tensor, has one too many, or one of another shape."""
    wrong = [f"{name!r} is missing" for name in known if name in needed and name not in state]
    wrong += [f"{name!r} is unknown" for name in state if name not in known]
    wrong += [
        f"{name!r} has shape {list(tensor.shape)} there and {list(known[name].shape)} here"
        for name, tensor in state.items()
        if name in needed and tensor.shape != known[name].shape
    ]
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise WrongNetworkError(
            f"{which} is of another network: {'; '.join(wrong[:4])}{more}. Members must have the "
            f"architecture of the network that is converted, and the same names."
        )
