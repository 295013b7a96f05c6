import pytest
import torch
from torch import Tensor, nn

from bayesify.operations import Operations, count_operations
from bayesify.sites import find_parameters


@pytest.mark.parametrize(
    ("layer", "shape", "products"),
    [
        (nn.Linear(6, 5, bias=False), (3, 6), 3 * 6 * 5),
        (nn.Conv2d(2, 4, 3, padding=1, bias=False), (3, 2, 8, 8), 3 * 4 * 8 * 8 * 2 * 3 * 3),
    ],
)
def test_products_count_twice(layer: nn.Module, shape: tuple[int, ...], products: int) -> None:
    x = torch.randn(shape)
    with torch.no_grad(), Operations() as operations:
        layer(x)
    assert operations.count == 2 * products


def test_the_rest_counts_what_it_makes_and_views_nothing() -> None:
    x = torch.randn(4, 5)
    with Operations() as operations:
        x.view(20).relu().t()
    assert operations.count == 20


def test_what_runs_before_a_site_counts_before_it() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 2, bias=False)
            self.first = nn.Linear(3, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    network, x = Backwards(), torch.randn(1, 3)
    begins, total = count_operations(find_parameters(network)[0], network, lambda own: own(x))
    assert begins == {"first.weight": 0, "last.weight": 2 * 3 * 5}
    assert total == 2 * 3 * 5 + 2 * 5 * 2
    assert not network.first._forward_pre_hooks
