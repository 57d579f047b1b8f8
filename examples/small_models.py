"""Two models that learn within seconds on a CPU, each with its data: inputs and targets.

Both give the logarithms of probabilities in their last dimension.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

CONTEXT = 64  # characters that the GPT sees


class Block(nn.Module):
    """Attention to earlier characters, then a layer that works on each alone."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # [batch, time, 3 * width] to three of [batch, heads, time, width / heads]
        parts = self.attend(self.before(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(found.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, characters: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, characters), nn.LogSoftmax(-1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.character(x) + self.position.weight[: x.shape[1]]
        return self.last(self.blocks(x))


def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A CNN, scikit-learn's handwritten digits, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits need scikit-learn: pip install scikit-learn") from None

    images, labels = load_digits(return_X_y=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(-1),
    )  # fmt: skip
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return model, x, torch.tensor(labels)


def text() -> tuple[nn.Module, Tensor, Tensor]:
    """A GPT, pieces of the LICENSE, and the same pieces one character later."""
    words = (Path(__file__).parents[1] / "LICENSE").read_text()
    known = sorted(set(words))
    numbers = torch.tensor([known.index(c) for c in words])
    pieces = numbers.unfold(0, CONTEXT + 1, CONTEXT)
    return GPT(len(known)), pieces[:, :-1], pieces[:, 1:]
