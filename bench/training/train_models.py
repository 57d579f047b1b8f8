"""Models of common sizes whose steps take a CPU rank fractions of a second."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]
"""A model that gives logits [n, classes], and what draws a batch of inputs and classes."""


class _Residual(nn.Module):
    """Convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int, *body: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*body), nn.Sequential()
        if before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def _block(before: int, width: int, stride: int) -> nn.Module:
    """Two convolutions (He et al., Deep residual learning, figure 2)."""
    return _Residual(
        before, width, stride,
        nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
    )  # fmt: skip


def resnet18(batch: int, size: int = 64) -> Made:
    """ResNet-18 for 1,000 classes: 11.7 million parameters, 41 tensors with a gradient of over
    64 values each."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    width = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_block(width, wide, stride), _block(wide, wide, 1)]
        width = wide
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return model, lambda: (torch.randn(batch, 3, size, size), torch.randint(1000, (batch,)))


def vgg11(batch: int, size: int = 32) -> Made:
    """VGG-11 for small images: 28 million parameters, most of them in the layers near the loss."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    model = nn.Sequential(*layers, *head, nn.Linear(4096, 1000))
    return model, lambda: (torch.randn(batch, 3, size, size), torch.randint(1000, (batch,)))


class _Encoder(nn.Module):
    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.embedding(x))).flatten(0, 1)


def transformer(batch: int, length: int = 32) -> Made:
    """An encoder of BERT-mini's size (4 layers, width 256, 30,522 words) with a tied decoder: 11
    million parameters, most of them used first and last."""
    words = 30522
    model = _Encoder(words, 256, 4)
    return model, lambda: (
        torch.randint(words, (batch, length)), torch.randint(words, (batch * length,))
    )  # fmt: skip


def vgg16() -> nn.Module:
    """VGG-16 for ImageNet (Simonyan and Zisserman, configuration D): 138,357,544 parameters."""
    layers: list[nn.Module] = []
    before = 3
    for width, many in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(many):
            layers.append(nn.Conv2d(before, width, 3, padding=1))
            before = width
    head = (nn.Linear(512 * 49, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000))
    return nn.Sequential(*layers, *head)


def _bottleneck(before: int, width: int, stride: int) -> nn.Module:
    """Three convolutions (the same, figure 5)."""
    return _Residual(
        before, 4 * width, stride,
        nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
    )  # fmt: skip


def resnet50() -> nn.Module:
    """ResNet-50 for ImageNet: 25,557,032 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    before = 64
    for width, many in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(many):
            layers.append(_bottleneck(before, width, 2 if i == 0 and width > 64 else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def resnet20() -> nn.Module:
    """ResNet-20 for Cifar-10 (He et al., section 4.2), whose shortcuts have parameters where they
    change width: 272,474 in all."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)]
    width = 16
    for wide, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [_block(width, wide, stride), _block(wide, wide, 1), _block(wide, wide, 1)]
        width = wide
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _shapes(make: Callable[[], nn.Module]) -> list[list[torch.Size]]:
    """The shapes of the parameters of each module, without their memory."""
    with torch.device("meta"):
        model = make()
    own = [[p.shape for p in part.parameters(recurse=False)] for part in model.modules()]
    return [shapes for shapes in own if shapes]


def digits_cnn(channels: int = 16) -> nn.Module:
    """A network for images of 8 by 8 digits: 72,000 parameters, with 32 channels 151,000."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * channels * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def digits_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


class WordLstm(nn.Module):
    """A language model: an LSTM whose decoder is tied to the embedding of words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(x))[0]).flatten(0, 1)


class WordTransformer(nn.Module):
    """Two layers that see what comes before, whose decoder is tied to the embedding of words."""

    def __init__(self, words: int, length: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.encoder(self.embedding(x) + self.positions, mask=self.mask, is_causal=True)
        return (self.norm(found) @ self.embedding.weight.T).flatten(0, 1)


MODELS: dict[str, Callable[[int], Made]] = {
    "resnet18": resnet18, "vgg11": vgg11, "transformer": transformer,
}  # fmt: skip

# the shapes of the parameters of each layer of a model
SHAPES: dict[str, Callable[[], list[list[torch.Size]]]] = {
    "vgg16": lambda: _shapes(vgg16),
    "resnet20": lambda: _shapes(resnet20),
    **{
        name: lambda make=make: _shapes(lambda: make(1)[0])  # type: ignore[misc]
        for name, make in MODELS.items()
    },
}
