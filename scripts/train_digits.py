"""Train the demo's digits network and write its checkpoint into the package.

Ordinary training with nothing done for calibration: the demo is about checkpoints as people have
them. The same file comes out on every run on one machine.
"""

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesify.data import split_digits
from bayesify.zoo import ASSETS, DigitsNet

EPOCHS = 40
BATCH = 32


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of right answers."""
    with torch.no_grad():
        return (model.eval()(x).argmax(dim=1) == y).double().mean().item()


def main() -> None:
    """Train, say how good it is, and write src/bayesify/assets/digits.safetensors."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DigitsNet()
    x, y = split_digits("train")
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        model.train()
        for rows in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    for part in ("train", "validation", "test"):
        print(f"{part}: accuracy {accuracy(model, *split_digits(part)):.4f}")
    ASSETS.mkdir(exist_ok=True)
    save_file(model.state_dict(), ASSETS / "digits.safetensors")


if __name__ == "__main__":
    main()
