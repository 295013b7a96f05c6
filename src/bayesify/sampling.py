"""Running a network at many draws: strategies, and chunks within a memory budget."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from bayesify.batches import Inputs
from bayesify.errors import BayesifyError, BayesifyWarning, DataError
from bayesify.heap import settle
from bayesify.memory import PeakMemory
from bayesify.posterior import Draws
from bayesify.replicas import Replicas, private_copy
from bayesify.tape import CannotTapeError, Recorder, Tape

MEMORY_BUDGET = 1 << 30
LARGEST_BATCH = 256
# What runs at once should stay near the processor: this many bytes, or this many examples.
CACHE = 3 << 23
FEW_EXAMPLES = 8
# Draws below which finding the fastest way costs more than it wins, and by which it is found.
WORTH_MEASURING = 4
# How often each way is tried at least, and seconds of trying until which it is tried more often;
# and beyond which only what is nearly as fast is tried a second time.
TURNS, SHORT, LONG_ENOUGH = 3, 0.4, 2.0
# Shapes of input that are taped and measured. Beyond that (texts of all lengths) shapes hardly come
# twice, and finding out costs more than it wins.
MOST_SHAPES = 16
# Results of several draws are handed on together, up to this many numbers.
TOGETHER = 1 << 16
TAPED = ("folded", "stacked")
STRATEGIES = ("looped", "vectorised", *TAPED, "compiled")
# What was found fastest in this process, so that networks of one kind are run in one way.
FASTEST: dict[tuple[str, str, str, int, int], str] = {}


@dataclass(frozen=True)
class Way:
    """How draws run.

    Args:
        strategy: "looped" or "vectorised" calls the network; "folded", "compiled" or "stacked"
            plays its tape, for one draw after another or, the last, for several together.
        chunk: How many draws run together.
        tape: The network's tape.
        spare: Bytes that may go into making it faster.
    """

    strategy: str
    chunk: int = 1
    tape: Tape | None = None
    spare: int = 0


class Runner:
    """Runs a network at draws.

    Args:
        network: A private copy, in eval mode; never run itself, only copies of it.
        read: Turns what the network returns into one tensor `[B, ...]`.
        shared: Tensors that take the place of the network's own in every draw.
        shares_trunk: Whether layers stand before the first random one.
        strategy: One of `STRATEGIES`, or "auto": what is fastest, measured once for each shape.
        adapting: Names of running statistics: their layers use each batch's, and update their own.

    Attributes:
        used: The strategies by which draws ran, for who wants to repeat that.
    """

    def __init__(
        self,
        network: nn.Module,
        read: Callable[[Any], Tensor],
        shared: Callable[[], Mapping[str, Tensor]] = dict,
        *,
        shares_trunk: bool = False,
        strategy: str = "auto",
        adapting: Collection[str] = (),
    ) -> None:
        self.replicas = Replicas(network, adapting=adapting)
        self.read = read
        self.shared = shared
        self.shares_trunk = shares_trunk
        self.strategy = strategy
        self._vmaps: dict[tuple[bool, bool, str], bool] = {}
        self._bytes: dict[str, int] = {}
        self._tapes: dict[str, Tape | None] = {}
        self._shapes: set[str] = set()
        self._kind = _kind(network)
        self.used: set[str] = set()

    def plain(self, draw: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Runs the network at one draw, `[B, ...]`.

        Raises:
            DataError: If the network cannot take these inputs.
        """
        try:
            return self._call(self.replicas.get(), draw, inputs)
        except (torch.OutOfMemoryError, BayesifyError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise DataError(
                f"the network cannot run on inputs {inputs.describe()}: {error}\n"
                f"Check their shape, type and order against what the network was trained on."
            ) from error

    def outputs(
        self, draws: Draws, inputs: Inputs, *, memory_budget: int | None = None
    ) -> Iterator[Tensor]:
        """Runs the network at all draws on the same inputs.

        Yields:
            Outputs of consecutive draws, stacked `[s, B, ...]`, as many at a time as memory allows.
        """
        budget = MEMORY_BUDGET if memory_budget is None else memory_budget
        way = self.way(draws, inputs, budget)
        self.used.add(way.strategy)
        most = 0 if torch.is_grad_enabled() else TOGETHER  # a graph is not kept for company
        kept: list[Tensor] = []
        for output in self._run(way, draws, inputs):
            kept.append(output)
            if len(kept) * output.numel() >= most:
                yield torch.cat(kept)
                kept = []
        if kept:
            yield torch.cat(kept)

    def paired(self, draws: Draws, groups: Inputs) -> Tensor:
        """Runs draw g on group g of the inputs, `[G, b, ...]`, vectorised."""
        return self._vectorised(draws, groups, paired=True)

    def way(self, draws: Draws, inputs: Inputs, memory_budget: int = MEMORY_BUDGET) -> Way:
        """How these draws run: as `strategy` says, or the fastest way."""
        count = _count(draws)
        if not draws or count == 1:
            return Way("looped")
        strategy = self.strategy
        # A tape has neither gradients nor mixed precision.
        tapes = not (torch.is_grad_enabled() or torch.is_autocast_enabled(_device_type(draws)))
        if strategy == "auto" and tapes:
            strategy = self._measured(draws, inputs, memory_budget)
        if strategy == "auto":
            together = self.shares_trunk or len(inputs) <= FEW_EXAMPLES
            strategy = "vectorised" if together else "looped"
        elif strategy in (*TAPED, "compiled") and not tapes:
            strategy = "looped"
        return self._within(strategy, draws, inputs, memory_budget)

    def _measured(self, draws: Draws, inputs: Inputs, memory_budget: int) -> str:
        """The fastest strategy, measured once in a process; "auto" where that is not worth it."""
        count, shape = _count(draws), inputs.describe()
        if count < WORTH_MEASURING:
            return "looped"
        situation = (self._kind, shape, ",".join(draws), count, torch.get_num_threads())
        if situation not in FASTEST:
            self._shapes.add(shape)
            if len(self._shapes) > MOST_SHAPES:
                return "auto"
            FASTEST[situation] = self._fastest(draws, inputs, memory_budget)
        return FASTEST[situation]

    def _within(self, strategy: str, draws: Draws, inputs: Inputs, memory_budget: int) -> Way:
        """The way of a strategy that keeps to the budget; where it cannot go, a loop."""
        if strategy == "vectorised" and self.can_vectorise(draws, inputs):
            return Way(strategy, self._chunk(draws, inputs, memory_budget))
        calls = strategy in ("looped", "vectorised")
        tape = None if calls else self._tape(draws, inputs)
        if tape is None:
            return Way("looped")
        if strategy == "compiled" and self._can_compile(tape, draws, inputs):
            return Way(strategy, 1, tape)
        if strategy != "stacked" or not self._can_stack(tape, draws, inputs):
            return Way("folded", 1, tape, memory_budget // 4)
        chunk = max(2, _near(tape), 2 * FEW_EXAMPLES // len(inputs))
        chunk = min(chunk, self._chunk(draws, inputs, memory_budget))
        turns = -(-_count(draws) // chunk)
        evenly = -(-_count(draws) // turns)  # no turn with few of them at the end
        return Way("stacked", evenly, tape)

    def _chunk(self, draws: Draws, inputs: Inputs, memory_budget: int) -> int:
        """How many draws can run together."""
        needed = self.bytes_per_example(draws, inputs) * len(inputs)
        return max(1, min(_count(draws), memory_budget // max(1, needed)))

    def _fastest(self, draws: Draws, inputs: Inputs, memory_budget: int) -> str:
        """Which strategy is, tried with a few draws."""
        tape = self._tape(draws, inputs)
        if tape is not None and len(inputs) > FEW_EXAMPLES and _near(tape) < WORTH_MEASURING:
            return "folded"  # a few large ones together only take more memory
        strategies = ("looped", "vectorised") if tape is None else TAPED
        tried = (self._within(s, draws, inputs, memory_budget) for s in strategies)
        ways = {way.strategy: way for way in tried}
        most = max(WORTH_MEASURING, *(way.chunk for way in ways.values()))
        few = {name: value[:most] for name, value in draws.items()}
        seconds = dict.fromkeys(ways, math.inf)
        begun = time.perf_counter()
        turn = 0
        while turn < TURNS or time.perf_counter() - begun < SHORT:
            for strategy, way in ways.items():
                started = time.perf_counter()
                for _ in self._run(way, few, inputs):
                    pass
                seconds[strategy] = min(seconds[strategy], time.perf_counter() - started)
            if time.perf_counter() - begun > LONG_ENOUGH:
                best = min(seconds.values())
                ways = {s: way for s, way in ways.items() if seconds[s] < 1.5 * best}
                if turn or len(ways) == 1:
                    break
            turn += 1  # the first time, kernels and memory are not at hand yet
        return min(seconds, key=lambda strategy: seconds[strategy])

    def _run(self, way: Way, draws: Draws, inputs: Inputs) -> Iterator[Tensor]:
        if way.tape is not None:
            yield from way.tape.play(
                draws,
                inputs,
                self.shared(),
                chunk=way.chunk,
                compiled=way.strategy == "compiled",
                spare=way.spare,
            )
            return
        for start in range(0, _count(draws), way.chunk):
            part = {name: value[start : start + way.chunk] for name, value in draws.items()}
            if way.chunk == 1:
                yield self.plain({n: v[0] for n, v in part.items()}, inputs).unsqueeze(0)
            else:
                yield self._vectorised(part, inputs, paired=False)

    def _tape(self, draws: Draws, inputs: Inputs) -> Tape | None:
        """The network's tape for inputs of this shape, made and tried once; None if it has none."""
        others = [v for v in (*inputs.args, *inputs.kwargs.values()) if not isinstance(v, Tensor)]
        situation = f"{inputs.describe()} {','.join(draws)} {others!r}"
        if situation not in self._tapes:
            try:
                tape = self._record(draws, inputs)
                good = self._agrees(Way("folded", 1, tape), draws, inputs)
                self._tapes[situation] = tape if good else None
            except torch.OutOfMemoryError:
                raise
            except (CannotTapeError, RuntimeError, TypeError, ValueError):
                self._tapes[situation] = None  # what is wrong with the inputs, a loop will say
        return self._tapes[situation]

    def _can_stack(self, tape: Tape, draws: Draws, inputs: Inputs) -> bool:
        """Whether a tape runs several draws together, tried once."""
        if tape.stacks is None:
            tape.stacks = self._agrees(Way("stacked", 2, tape), draws, inputs)
        return tape.stacks

    def _can_compile(self, tape: Tape, draws: Draws, inputs: Inputs) -> bool:
        """Whether a tape runs compiled, tried once; if it does not, this is said."""
        if tape.compiles is None:
            way, failure = Way("compiled", 1, tape), "its results are others"
            one = {name: value[:1] for name, value in draws.items()}
            try:
                with torch.no_grad():
                    list(self._run(way, one, inputs))
                tape.compiles = self._agrees(way, draws, inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # there is no compiler, for instance
                tape.compiles, failure = False, str(error).strip().splitlines()[0][:200]
            if not tape.compiles:
                warnings.warn(
                    f"{type(self.replicas.network).__name__} cannot be compiled ({failure}): draws "
                    f"run as they do with the strategy 'folded', with the same results.",
                    BayesifyWarning,
                    stacklevel=2,
                )
        return tape.compiles

    def _record(self, draws: Draws, inputs: Inputs) -> Tape:
        settle()  # the heap, whose memory all that is played takes and frees again
        # Of its own: what a network may store away as it runs here is no ordinary tensor.
        network = private_copy(self.replicas.network)
        inputs = inputs.map(Tensor.detach)
        own = {name: value[0] for name, value in draws.items()}
        named = {**{name: value.detach() for name, value in self.shared().items()}, **own}
        with torch.inference_mode(), Recorder(named, list(own), inputs.tensors()) as recorder:
            result = self._call(network, own, inputs, shared=named)
        return recorder.tape(result)

    def _agrees(self, way: Way, draws: Draws, inputs: Inputs) -> bool:
        """Whether playing the tape for other inputs gives what the network gives."""
        other = inputs.map_batched(_altered)
        two = {name: value[torch.arange(2) % len(value)] for name, value in draws.items()}
        with torch.no_grad():
            wanted = torch.cat(list(self._run(Way("looped"), two, other)))
            try:
                played = torch.cat(list(self._run(way, two, other)))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # something on the tape has no vmap rule, for instance
                return False
        if wanted.shape != played.shape or wanted.dtype not in (torch.float32, torch.float64):
            return False
        scale = wanted.abs().amax().item()
        return bool((wanted - played).abs().amax() <= 1e-4 * scale)

    def batch_size(
        self,
        draws: Draws,
        inputs: Inputs,
        memory_budget: int | None = None,
        *,
        examples: int | None = None,
    ) -> int:
        """How many examples like these should run at once.

        Args:
            draws: Stacked.
            inputs: One example is enough.
            memory_budget: Bytes that they may take.
            examples: How many there are, to be parted evenly.
        """
        budget = MEMORY_BUDGET if memory_budget is None else memory_budget
        needed = self.bytes_per_example(draws, inputs)
        near = max(FEW_EXAMPLES, 2 * CACHE // needed)  # scratch memory is used again
        most = max(1, min(LARGEST_BATCH, near, budget // needed))
        parts = -(-(examples or most) // most)
        return -(-(examples or most) // parts)

    def bytes_per_example(self, draws: Draws, inputs: Inputs) -> int:
        """Peak memory of one draw on one example, measured once for each shape of input."""
        example = inputs[:1]
        shape = example.describe()
        if shape not in self._bytes:
            with torch.no_grad(), PeakMemory() as memory:
                self.plain({name: value[0] for name, value in draws.items()}, example)
            # Convolutions and matrix products use scratch memory that no tensor holds.
            self._bytes[shape] = max(1, 2 * memory.peak)
        return self._bytes[shape]

    def can_vectorise(self, draws: Draws, inputs: Inputs, *, paired: bool = False) -> bool:
        """Whether the network has a vmap rule, found out by trying once for each kind of input."""
        example = (
            inputs.map_batched(lambda t: t[torch.arange(2) % len(t)]) if paired else inputs[:1]
        )
        autocast = torch.is_autocast_enabled(_device_type(draws))
        situation = (paired, autocast, example.describe())
        if situation not in self._vmaps:
            failure = self._vmap_failure(draws, example, paired=paired)
            if failure and self.strategy != "looped" and all(self._vmaps.values()):
                warnings.warn(
                    f"{type(self.replicas.network).__name__} cannot be vectorised over "
                    f"{'examples' if paired else 'draws'} ({failure}): draws run one after "
                    f"another, with the same results.",
                    BayesifyWarning,
                    stacklevel=2,
                )
            self._vmaps[situation] = not failure
        return self._vmaps[situation]

    def _vmap_failure(self, draws: Draws, example: Inputs, *, paired: bool) -> str:
        """Why two draws cannot run vectorised; empty if they can."""
        two = {name: value[torch.arange(2) % len(value)] for name, value in draws.items()}
        groups = example.map_batched(lambda t: t.unsqueeze(1)) if paired else example
        try:
            with torch.no_grad():
                self._vectorised(two, groups, paired=paired)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # If the plain network fails as well, the input is to blame and this raises.
            self.plain({name: value[0] for name, value in draws.items()}, example[:1])
            return str(error).strip().splitlines()[0][:200]
        return ""

    def _vectorised(self, draws: Draws, inputs: Inputs, *, paired: bool) -> Tensor:
        network = self.replicas.get()
        if not paired:
            return vmap(lambda draw: self._call(network, draw, inputs))(draws)
        groups = _count(draws)
        arguments = (inputs.args, inputs.kwargs)

        def split(value: Any) -> int | None:
            batched = isinstance(value, Tensor) and value.ndim > 0 and len(value) == groups
            return 0 if batched else None

        def run(draw: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            return self._call(network, draw, Inputs(args, kwargs))

        dims = tuple(tree_map(split, argument) for argument in arguments)
        return vmap(run, in_dims=(0, *dims))(draws, *arguments)

    def _call(
        self,
        network: nn.Module,
        draw: Mapping[str, Tensor],
        inputs: Inputs,
        shared: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        values = {**(self.shared() if shared is None else shared), **draw}
        tensors = {place: value for name, value in values.items() for place in self.slots[name]}
        return self.read(
            # Ties are resolved by slots(): torch's own way corrupts modules registered twice.
            functional_call(network, tensors, inputs.args, inputs.kwargs, tie_weights=False)
        )

    @property
    def slots(self) -> dict[str, tuple[str, ...]]:
        """Every place in the network where a named tensor stands."""
        return self.replicas.slots


def _kind(network: nn.Module) -> str:
    """What networks of the same architecture have in common."""
    tensors = chain(network.named_parameters(), network.named_buffers())
    return f"{type(network)} {[(n, tuple(t.shape), t.dtype, t.device) for n, t in tensors]}"


def _altered(tensor: Tensor) -> Tensor:
    """Another input of the same kind."""
    if tensor.is_floating_point():
        return 0.9 * tensor.roll(1, 0)
    return tensor.roll(1, 0) if len(tensor) > 1 else tensor.flip(-1)


def _count(draws: Mapping[str, Tensor]) -> int:
    """How many draws; where no tensor is random, one says all."""
    return len(next(iter(draws.values()))) if draws else 1


def _near(tape: Tape) -> int:
    """How many draws stay near the processor together: their widest result, and two operands."""
    return CACHE // (3 * tape.widest)


def _device_type(draws: Mapping[str, Tensor]) -> str:
    return next(iter(draws.values())).device.type
