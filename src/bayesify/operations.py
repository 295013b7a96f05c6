"""How many operations a network does, and how many of them before each site."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bayesify.sites import Site, first_runs


class Operations(TorchDispatchMode):
    """Counts what is done inside it: products by formula, anything else one a number made.

    Counting, unlike timing, gives the same every time.

    Example:
        >>> with Operations() as operations:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> operations.count  # two sets of ones, and 2 x 3 x 4 products, each added up
        66
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch.utils.flop_counter import flop_registry

        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=result)
        elif not func.is_view:
            self.count += sum(t.numel() for t in tree_iter(result) if isinstance(t, Tensor))
        return result


def count_operations(
    sites: Sequence[Site], network: nn.Module, run: Callable[[nn.Module], object]
) -> tuple[dict[str, float], int]:
    """Operations done before each site's layer first runs, by the site's name, and all of them.

    Args:
        sites: The sites of `network`.
        network: A private copy: it is run, with hooks.
        run: Runs the network on an example.
    """
    with torch.no_grad(), Operations() as operations:
        begins = first_runs(sites, network, run, lambda: operations.count)
    return begins, operations.count
