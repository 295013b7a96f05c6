"""Random, tied and degenerate examples for the tests of measures."""

import torch
from hypothesis import strategies as st
from torch import Tensor

TIES = (0.0, 1 / 15, 0.2, 1 / 3, 0.5, 0.6, 14 / 15, 1.0)


@st.composite
def judged(draw: st.DrawFn, least: int = 1) -> tuple[Tensor, Tensor]:
    """Confidences in [0, 1] and whether they were right: spread out, tied, or all the same."""
    size, kind = (
        draw(st.integers(least, 60)),
        draw(st.sampled_from(["any", "ties", "mixed", "one"])),
    )
    accuracy = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    some = torch.rand(size, generator=generator, dtype=torch.float64)
    rows = torch.randint(len(TIES), (size,), generator=generator)
    tied = torch.tensor(TIES, dtype=torch.float64)[rows]
    mixed = torch.where(torch.rand(size, generator=generator) < 0.5, some, tied)
    confidence = {"any": some, "ties": tied, "mixed": mixed, "one": tied[:1].expand(size)}[kind]
    return confidence, torch.rand(size, generator=generator) < accuracy


@st.composite
def predicted(draw: st.DrawFn, most: int = 40) -> tuple[Tensor, Tensor]:
    """Probabilities `[N, C]` and classes `[N]`: soft, certain, tied, or of one class only."""
    size, classes = draw(st.integers(1, most)), draw(st.integers(2, 5))
    kind = draw(st.sampled_from(["soft", "sharp", "certain", "uniform"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64)
    if kind == "certain":
        probs = torch.nn.functional.one_hot(logits.argmax(1), classes).double()
    else:
        probs = torch.softmax({"soft": 1, "sharp": 30, "uniform": 0}[kind] * logits, 1)
    if draw(st.booleans()):
        return probs, torch.full((size,), draw(st.integers(0, classes - 1)))
    return probs, torch.randint(0, classes, (size,), generator=generator)
