"""The trunk: what a network computes before anything that trains, and the rest behind it.

Where only late layers train, a training batch needs the trunk's outputs once, without gradients,
however many members or draws run behind it. The network is taped for one example and cut where
what trains comes in; both halves run under `vmap` over examples. Before that is used, outputs and
gradients of trunk and rest are compared with the network's own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayesify.batches import Inputs
from bayesify.errors import BayesifyError
from bayesify.posterior import Draws
from bayesify.replicas import private_copy
from bayesify.sampling import Runner
from bayesify.tape import CannotTapeError, Cut, Recorder, channels_last

# Which part of the network must stand before what trains for a cut to pay.
SHARE = 0.5
# Examples by which trunk and rest are compared with the network.
EXAMPLES = 8
# What rounding may do, relative to the largest number.
OUTPUTS = 1e-4
GRADIENTS = 1e-3


class Rest(Runner):
    """Runs what stands behind the trunk; its inputs are the trunk's outputs."""

    def __init__(self, runner: Runner, cut: Cut) -> None:
        network, read = runner.replicas.network, runner.read
        super().__init__(network, read, runner.shared, strategy=runner.strategy)
        self.cut = cut

    def _call(
        self,
        network: nn.Module,  # noqa: ARG002
        draw: Mapping[str, Tensor],
        inputs: Inputs,
        shared: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        named = {**(self.shared() if shared is None else shared), **draw}
        if len(inputs) == 1:
            return self.cut.rest(named, [feature[0] for feature in inputs.args])
        return vmap(lambda *one: self.cut.rest(named, one))(*inputs.args).flatten(0, 1)


class Split:
    """A network as trunk and rest, for inputs of one shape.

    Attributes:
        rest: Runs the rest.
    """

    def __init__(self, cut: Cut, rest: Rest) -> None:
        self._cut = cut
        self.rest = rest

    def features(self, inputs: Inputs) -> Inputs:
        """The trunk's outputs, those of each example in a row of its own."""
        apart = [channels_last(tensor).unsqueeze(1) for tensor in inputs.tensors()]
        with torch.no_grad():
            found = vmap(lambda *one: self._cut.trunk(one))(*apart)
        # In the usual order: the rest has gradients, and is not faster in the other.
        return Inputs(tuple(feature.contiguous() for feature in found), {})

    def agrees(self, runner: Runner, draws: Draws, inputs: Inputs, *, paired: bool) -> bool:
        """Whether outputs and gradients are the network's.

        Args:
            runner: Runs the whole network.
            draws: Two.
            inputs: Not only the example by which the network was taped.
            paired: Whether examples will have draws of their own.
        """
        features = self.features(inputs)
        with torch.enable_grad():
            own = {name: value.detach().requires_grad_() for name, value in draws.items()}
            first = {name: value[0] for name, value in own.items()}
            pairs = [(runner.plain(first, inputs), self.rest.plain(first, features))]
            if paired:
                two = [i[len(i) - 2 :].map(lambda t: t.unsqueeze(1)) for i in (inputs, features)]
                pairs += [(runner.paired(own, two[0]), self.rest.paired(own, two[1]))]
            everything = (*own.values(), *runner.shared().values())
            wanted = [value for value in everything if value.requires_grad]
            return all(_alike(*pair, wanted) for pair in pairs)


def split(runner: Runner, draws: Draws, inputs: Inputs, *, paired: bool) -> Split | None:
    """Splits a network; None where that does not pay or cannot be done with the same results.

    Args:
        runner: Runs the network.
        draws: Two, such as training runs at.
        inputs: Two examples or more.
        paired: Whether examples will have draws of their own.
    """
    if not is_plain(inputs) or len(inputs) < 2 or not draws:
        return None
    try:
        cut = _record(runner, draws, inputs[:1])
        if cut.share < SHARE or not cut.slots:
            return None
        found = Split(cut, Rest(runner, cut))
        return found if found.agrees(runner, draws, inputs[:EXAMPLES], paired=paired) else None
    except torch.OutOfMemoryError:
        raise
    except (CannotTapeError, BayesifyError, RuntimeError, TypeError, ValueError, IndexError):
        return None  # what is wrong with the inputs, the network itself will say


def is_plain(inputs: Inputs) -> bool:
    """Whether all arguments are tensors that have a row for each example."""
    values, size = (*inputs.args, *inputs.kwargs.values()), len(inputs)
    return all(isinstance(v, Tensor) and v.ndim > 0 and len(v) == size for v in values)


def _record(runner: Runner, draws: Draws, example: Inputs) -> Cut:
    network = private_copy(runner.replicas.network)
    example = example.map(Tensor.detach)
    named = {name: value.detach() for name, value in runner.shared().items()}
    named |= {name: value[0].detach() for name, value in draws.items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it has no gradients
    try:
        with torch.inference_mode(), Recorder(named, list(named), example.tensors()) as recorder:
            result = runner._call(network, {}, example, shared=named)
        return recorder.cut(result)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _alike(whole: Tensor, parts: Tensor, trained: list[Tensor]) -> bool:
    """Whether two outputs are the same to rounding, and their gradients."""
    if whole.shape != parts.shape or whole.dtype != parts.dtype:
        return False
    direction = torch.cos(torch.arange(whole.numel(), device=whole.device)).view(whole.shape)
    slopes = [
        torch.autograd.grad(output, trained, direction.to(output), allow_unused=True)
        for output in (whole, parts)
    ]
    largest = max((float(s.abs().max()) for s in slopes[0] if s is not None), default=0.0)
    return _close(whole.detach(), parts.detach(), OUTPUTS, 0.0) and all(
        (a is None and b is None)
        or (a is not None and b is not None and _close(a, b, GRADIENTS, 1e-3 * largest))
        for a, b in zip(*slopes, strict=True)
    )


def _close(a: Tensor, b: Tensor, tolerance: float, least: float) -> bool:
    scale = max(float(a.abs().max()), least)
    return bool((a - b).abs().max() <= tolerance * scale)  # which a NaN is not
