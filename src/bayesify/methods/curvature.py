r"""The curvature of the loss by a network's weights, as a backend of laplace-torch.

The Gauss-Newton matrix $\sum_i J_i^T \Lambda_i J_i$, J the outputs' derivatives by the weights and
$\Lambda$ the second derivative of the loss by the outputs: $diag(p) - p p^T$ for classes, 1 for
values.

- In the last linear layer $J^T \Lambda J = \Lambda \otimes \phi \phi^T$ with $\phi$ the layer's
  input and a one: a forward pass is enough, and no derivative for each class is needed.
- Over all weights, the diagonal is the sum of the squares of $J^T s$ over examples and columns s
  of S, $\Lambda = S S^T$. $J^T s$ is the gradient of $s^T f$, taken for a batch at once by giving
  every example weights of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bayesify.errors import DataError, UnsupportedNetworkError

if TYPE_CHECKING:
    from bayesify.batches import Inputs
    from bayesify.likelihood import Likelihood
    from bayesify.model import BayesianModel

LARGEST_GRADIENTS = 1 << 26  # numbers in the gradients of a batch, over all of its examples
Example = tuple["Inputs", Tensor]


class Curvature(nn.Module, ABC):
    """A network as laplace-torch sees it: a vector of weights, outputs, and their curvature.

    The vector is in double precision on the CPU, and so is all that laplace-torch makes of it: the
    curvature of classes is singular, and with a weak prior single precision could not invert it.

    Args:
        model: Whose network it is. Private copies of it run.
        weights: The weights that count, by name, as they are in the network.
    """

    def __init__(self, model: "BayesianModel", weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.runner = model.runner
        self.device = model.device
        self.classes = model.likelihood.kind == "classes"
        self.tensors = dict(weights)
        flat = torch.cat([tensor.detach().flatten() for tensor in weights.values()])
        self.vector = nn.Parameter(flat.to("cpu", torch.float64))

    def forward(self, inputs: "Inputs") -> Tensor:
        """Logits or means, `[B, C]`."""
        return self.read(self.runner.plain({}, inputs.to(self.device)))

    def read(self, output: Tensor) -> Tensor:
        """Logits or means `[B, C]` of what the likelihood reads.

        Raises:
            DataError: If there is more than one label an example.
        """
        if not self.classes:
            return output[:, 0].reshape(len(output), -1)
        if output.ndim > 2:
            raise DataError(
                f"Laplace takes one label an example, and this network gives logits "
                f"{list(output.shape)}: use another method where every pixel has a label."
            )
        return output

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Negative log-likelihood of a batch, of values with a noise of 1 and no constant."""
        target = target.to(outputs.device)
        if self.classes:
            return cross_entropy(outputs, target, reduction="sum").cpu()
        return (outputs - target).square().sum().cpu() / 2

    @property
    def largest_batch(self) -> int | None:
        """How many examples fit into memory at a time, beyond what the network itself needs."""
        return None

    @abstractmethod
    def diag(self, inputs: "Inputs", target: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and the diagonal of the curvature of a batch, `[P]`."""


class LastLayer(Curvature):
    """The curvature by weight and bias of the network's last linear layer, or one of them."""

    @torch.no_grad()
    def full(self, inputs: "Inputs", target: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and the curvature of a batch, `[P, P]`."""
        outputs, width, features = self._run(inputs)
        second = torch.eye(width).to(outputs).expand(len(outputs), -1, -1)
        if self.classes:
            p = outputs.softmax(1)
            second = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1))[:, -width:, -width:]
        rows = [
            features.T @ (row.unsqueeze(2) * features.unsqueeze(1)).flatten(1)
            for row in second.unbind(1)
        ]
        order = self._order(width, features.shape[1])
        return self.loss(outputs, target), torch.cat(rows)[order.unsqueeze(1), order]

    @torch.no_grad()
    def diag(self, inputs: "Inputs", target: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and the diagonal of the curvature of a batch, `[P]`."""
        outputs, width, features = self._run(inputs)
        p = outputs.softmax(1)
        second = p * (1 - p) if self.classes else torch.ones_like(outputs)
        diagonal = (second[:, -width:].T @ features.square()).flatten()
        return self.loss(outputs, target), diagonal[self._order(width, features.shape[1])]

    def _run(self, inputs: "Inputs") -> tuple[Tensor, int, Tensor]:
        """Outputs, how many of them the layer makes, and its inputs with a one, `[B, F + 1]`."""
        name = next(iter(self.tensors)).rpartition(".")[0]
        calls: list[tuple[Tensor, Tensor]] = []
        layer = self.runner.replicas.get().get_submodule(name)
        handle = layer.register_forward_hook(lambda _, args, made: calls.append((args[0], made)))
        try:
            outputs = self(inputs)
        finally:
            handle.remove()
        if len(calls) != 1 or not self._says_the_same(outputs, calls[0][1]):
            raise UnsupportedNetworkError(
                f"the linear layer that is registered last, {name!r}, does not give the network's "
                f"output: it runs {len(calls)} times, or something comes after it. Use "
                f"Laplace(subset='all')."
            )
        outputs, features, made = (t.to("cpu", torch.float64) for t in (outputs, *calls[0]))
        return outputs, made.shape[1], torch.cat([features, torch.ones_like(made[:, :1])], dim=1)

    def _says_the_same(self, outputs: Tensor, made: Tensor) -> bool:
        """Whether the network's outputs are those of its last layer."""
        if made.ndim != 2:
            return False
        if self.classes:
            if made.shape[1] == 1:  # yes or no, which is read as two logits, the first of them 0
                made = torch.cat([torch.zeros_like(made), made], dim=1)
            outputs, made = outputs.float().log_softmax(1), made.float().log_softmax(1)
        return outputs.shape == made.shape and torch.allclose(outputs, made, rtol=1e-3, atol=1e-4)

    def _order(self, width: int, columns: int) -> Tensor:
        """Where the vector's numbers stand among weights with the biases as their last column."""
        places = torch.arange(width * columns).view(width, columns)
        parts = [places[:, :-1] if t.ndim > 1 else places[:, -1] for t in self.tensors.values()]
        return torch.cat([part.flatten() for part in parts])


class AllWeights(Curvature):
    """The diagonal of the curvature by any weights of a network that can be vectorised."""

    @property
    def largest_batch(self) -> int | None:
        """By the gradients, a vector of weights for each example."""
        return max(1, LARGEST_GRADIENTS // len(self.vector))

    def diag(self, inputs: "Inputs", target: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and the diagonal of the curvature of a batch, `[P]`."""
        inputs = inputs.to(self.device)
        own = {
            name: tensor.detach().expand(len(inputs), *tensor.shape).requires_grad_()
            for name, tensor in self.tensors.items()
        }
        if not self.runner.can_vectorise(own, inputs, paired=True):
            raise UnsupportedNetworkError(
                "Laplace(subset='all') needs the gradients of every example, and this network "
                "cannot be vectorised over examples. Use Laplace(subset='last-layer')."
            )
        apart = inputs.map_batched(lambda t: t.unsqueeze(1))
        outputs = self.read(self.runner.paired(own, apart).flatten(0, 1))
        roots = torch.eye(outputs.shape[1]).to(outputs).expand(len(outputs), -1, -1)
        if self.classes:
            p = outputs.detach().softmax(1)
            roots = torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
        total = torch.zeros_like(self.vector, requires_grad=False)
        for s in roots.unbind(2):
            gradients = torch.autograd.grad(
                (outputs * s).sum(), list(own.values()), retain_graph=True, materialize_grads=True
            )
            total += torch.cat([g.square().sum(0).flatten() for g in gradients]).cpu()
        return self.loss(outputs.detach(), target), total


class Loader(list[Example]):
    """A batch, as laplace-torch takes a loader: it has a `dataset`, of which the length counts."""

    @property
    def dataset(self) -> Tensor:
        """The targets."""
        return self[0][1]


def loaders(
    model: "BayesianModel", curvature: Curvature, data: Iterable[tuple["Inputs", Any]]
) -> Iterator[Loader]:
    """Batches with targets that are checked, small enough for memory.

    Raises:
        DataError: If inputs or targets cannot be used.
    """
    for whole, target in data:
        inputs = whole
        inputs.require_finite()
        with torch.no_grad():
            first = model.runner.plain({}, inputs[:1].to(model.device))
        outputs = curvature.read(first).expand(len(inputs), -1)
        wanted = model.likelihood.target(target, first.expand(len(inputs), *first.shape[1:]))
        if curvature.classes:
            inputs, wanted = _counted(inputs, wanted, model.likelihood)
        else:
            wanted = wanted.reshape(outputs.shape)
        if len(wanted):
            size = curvature.largest_batch or len(wanted)
            for batch in zip(inputs.split(size), wanted.split(size), strict=True):
                yield Loader([batch])


def _counted(inputs: "Inputs", target: Tensor, likelihood: "Likelihood") -> Example:
    """The examples whose label counts."""
    rows = target.ne(getattr(likelihood, "ignore_index", -1))
    return inputs.map_batched(lambda t: t[rows.to(t.device)]), target[rows]
