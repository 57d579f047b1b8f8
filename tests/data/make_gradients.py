"""Makes gradients.npz: gradients of real training, for tests of sparse kernels.

    python tests/data/make_gradients.py

digits: the demo's CNN on scikit-learn's handwritten digits, after 30 steps of SGD. words: a small
language model (the 4 words before -> the next one) on the text of Python's own documentation, as
`pydoc_data.topics` holds it, after 60 steps; most rows of its embedding's gradient are zero. Both
are flat float32, layer by layer in the model's order.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from linkweave.bench.training.train_models import digits_cnn

VOCABULARY, CONTEXT, WIDTH, HIDDEN = 512, 4, 32, 64
BATCH = 64


def flat_gradient(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, steps: int
) -> np.ndarray:
    """Of the batch behind `steps` steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps + 1):
        start = step * BATCH % (len(inputs) - BATCH)
        loss = nn.functional.cross_entropy(
            model(inputs[start : start + BATCH]), targets[start : start + BATCH]
        )
        optimizer.zero_grad()
        loss.backward()
        if step < steps:
            optimizer.step()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()


def digits() -> np.ndarray:
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return flat_gradient(digits_cnn(), images, torch.tensor(data.target), 30)


def words() -> np.ndarray:
    torch.manual_seed(0)
    text = [word for name in sorted(topics) for word in re.findall(r"[a-z]+", topics[name].lower())]
    common = {word: i for i, (word, _) in enumerate(Counter(text).most_common(VOCABULARY - 1), 1)}
    tokens = torch.tensor([common.get(word, 0) for word in text])  # 0: any other word
    inputs = tokens[:-1].unfold(0, CONTEXT, 1)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, HIDDEN),
        nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY),
    )  # fmt: skip
    return flat_gradient(model, inputs, tokens[CONTEXT:], 60)


if __name__ == "__main__":
    path = Path(__file__).with_name("gradients.npz")
    np.savez_compressed(path, digits=digits(), words=words())
    for name, gradient in np.load(path).items():
        print(f"{name}: {gradient.size} elements, {np.count_nonzero(gradient)} not zero")
