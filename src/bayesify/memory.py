"""How much memory tensors take."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory(TorchDispatchMode):
    """Measures the most memory that tensors made inside it hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = {_memory(t)[1] for t in tree_iter(args) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                memory, key = _memory(tensor)
                if key not in known and key not in self._seen:
                    self._hold(memory, key)
        return result

    def _hold(self, memory: Tensor | torch.UntypedStorage, key: int) -> None:
        size = memory.nbytes if isinstance(memory, Tensor) else memory.nbytes()
        self._seen.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(memory, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


def _memory(tensor: Tensor) -> tuple[Tensor | torch.UntypedStorage, int]:
    """What holds a tensor's memory, and a number for it; packed weights have it to themselves."""
    if tensor.is_mkldnn:
        return tensor, id(tensor)
    storage = tensor.untyped_storage()
    return storage, storage._cdata
