"""Private copies of a network, so that the user's own is never run.

`torch.func.functional_call` swaps tensors inside a module while it runs: every thread does so in a
structural copy of its own, which shares the weights' storage.
"""

import copy
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bayesify.errors import UnsupportedNetworkError
from bayesify.sites import slots

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def private_copy(network: ModuleT, *, share: bool = True) -> ModuleT:
    """Copies a network's structure, in eval mode and without gradients.

    Parameters stand on the original's storage, so that no weight is copied; buffers are copied, so
    that a network which writes into them as it runs does not write into the original's.

    Args:
        network: The original. It is not changed and not run.
        share: False copies the parameters too and leaves them trainable: an independent network.

    Raises:
        UnsupportedNetworkError: If the network cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in network.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedNetworkError(
                "the network is a ScriptModule, whose tensors cannot be replaced. Convert the "
                "Python module it was made from."
            )
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                value = parameter.detach() if share else parameter.detach().clone()
                trains = not share and parameter.is_floating_point()
                memo[id(parameter)] = nn.Parameter(value, requires_grad=trains)
        for tensor in _plain_tensors([vars(module), module._buffers]):
            memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        return copy.deepcopy(network, memo).eval()
    except (TypeError, RuntimeError) as error:
        raise UnsupportedNetworkError(
            f"the network cannot be copied ({error}). Remove what cannot be copied from its "
            f"attributes (locks, open files), or give the class a __deepcopy__."
        ) from error


class Replicas:
    """One private copy of a network a thread, made when the thread first asks.

    Args:
        network: What is copied.
        adapting: Names of the running statistics whose layers are in training mode.
    """

    def __init__(self, network: nn.Module, *, adapting: Collection[str] = ()) -> None:
        self.network = network
        self.adapting = adapting
        self.slots = slots(network)
        self._local = threading.local()

    def get(self) -> nn.Module:
        """This thread's copy."""
        if not hasattr(self._local, "network"):
            self._local.network = private_copy(self.network)
            for name in self.adapting:
                self._local.network.get_submodule(name.rpartition(".")[0]).train()
        network: nn.Module = self._local.network
        return network


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in a module's attributes, those in lists, tuples and dicts too."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _plain_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _plain_tensors(item)
