"""PyTorch's twins of ``networks``: the same layers, as a list of blocks that may be cut anywhere between two.

Every block takes one tensor, or the two of which the second goes past it, and gives as many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.networks import CLASSES, Network

VGG_CONVOLUTIONS = (2, 2, 3, 3, 3)
RESNET_BLOCKS = {50: (3, 4, 6, 3), 26: (2, 2, 2, 2), 14: (1, 1, 1, 1)}


class Chain(nn.Module):
    """Blocks one after another, each given all that the one before gave."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *values: torch.Tensor) -> Any:
        """One tensor, or a tuple of them."""
        for block in self.blocks:
            given = block(*values)
            values = given if isinstance(given, tuple) else (given,)
        return values if len(values) > 1 else values[0]


class _ContiguousGradient(torch.autograd.Function):
    """The same values, not as a view, of which PyTorch halves no backward; their gradient in one piece."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class Received(nn.Module):
    """What another process sent and wants gradients of: gloo sends none that are transposed, as attention's are."""

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same values."""
        return tuple(_ContiguousGradient.apply(value) for value in values)


def blocks(network: Network) -> list[nn.Module]:
    """The network's blocks, 10 classes."""
    return BUILDERS[network.name](network.input_shape, **network.size)


def dense(input_shape: tuple[int, ...], depth: int, width: int) -> list[nn.Module]:
    """Dense layers with ReLU."""
    return _dense(input_shape[0], depth, width, nn.ReLU)


def snn(input_shape: tuple[int, ...], depth: int, width: int) -> list[nn.Module]:
    """Dense layers with SELU."""
    return _dense(input_shape[0], depth, width, nn.SELU)


def _dense(given: int, depth: int, width: int, activation: Callable[[], nn.Module]) -> list[nn.Module]:
    sizes = [given, *[width] * depth]
    hidden = [nn.Sequential(nn.Linear(a, b), activation()) for a, b in itertools.pairwise(sizes)]
    return [*hidden, nn.Linear(width, CLASSES)]


def vgg16(input_shape: tuple[int, ...], width: int) -> list[nn.Module]:
    """Thirteen convolutions and three dense layers."""
    made: list[nn.Module] = []
    channels = input_shape[-1]
    for group, count in enumerate(VGG_CONVOLUTIONS):
        for n in range(count):
            wanted = width * min(2**group, 8)
            layers = [nn.Conv2d(channels, wanted, 3, padding=1), nn.ReLU(inplace=True)]
            made.append(nn.Sequential(*layers, *[nn.MaxPool2d(2)] * (n == count - 1)))
            channels = wanted
    features = channels * (input_shape[0] // 32) * (input_shape[1] // 32)
    for given in (features, 64 * width):
        made.append(nn.Sequential(nn.Flatten(), nn.Linear(given, 64 * width), nn.ReLU(inplace=True), nn.Dropout(0.5)))
    return [*made, nn.Linear(64 * width, CLASSES)]


class Bottleneck(nn.Module):
    """Three convolutions and a skip connection."""

    def __init__(self, given: int, channels: int, stride: int, project: bool) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *_normed(given, channels, 1, 1),
            nn.ReLU(inplace=True),
            *_normed(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(channels, 4 * channels, 1, 1),
        )
        self.skip = nn.Sequential(*_normed(given, 4 * channels, 1, stride)) if project else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """ReLU of the sum."""
        return torch.relu_(self.path(x) + self.skip(x))


def _normed(given: int, channels: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(given, channels, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


def resnet152(input_shape: tuple[int, ...], depth: int, width: int) -> list[nn.Module]:
    """A stem for small images, four groups of bottleneck blocks, the mean, logits."""
    made: list[nn.Module] = [nn.Sequential(*_normed(input_shape[-1], width, 3, 1), nn.ReLU(inplace=True))]
    given = width
    for group, count in enumerate(RESNET_BLOCKS[depth]):
        for n in range(count):
            channels = width * 2**group
            made.append(Bottleneck(given, channels, 2 if n == 0 and group else 1, project=n == 0))
            given = 4 * channels
    return [*made, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, CLASSES))]


class Words(nn.Module):
    """The words' vectors and positions, twice: the encoder's input, and what the decoder will read."""

    def __init__(self, words: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.vectors, self.scale = nn.Embedding(vocabulary, width), math.sqrt(width)
        nn.init.normal_(self.vectors.weight, std=width**-0.5)
        pairs = torch.arange(width) // 2 * 2 / width
        angles = torch.arange(words)[:, None] / 10_000**pairs
        even = torch.arange(width) % 2 == 0
        self.register_buffer("positions", torch.where(even, angles.sin(), angles.cos()))

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        x = self.vectors(words) * self.scale + self.positions
        return x, x


class Attention(nn.Module):
    """Attention, sum and normalization."""

    def __init__(self, width: int, heads: int, words: int | None = None) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        later = None if words is None else torch.triu(torch.full((words, words), -torch.inf), 1)
        self.register_buffer("later", later)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` is what it attends to."""
        causal = self.later is not None
        y, _ = self.attend(x, memory, memory, need_weights=False, attn_mask=self.later, is_causal=causal)
        return self.norm(x + y)


class FeedForward(nn.Module):
    """Two dense layers, sum and normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return self.norm(x + self.layers(x))


class Encoder(nn.Module):
    """A block of the encoder, past which goes what the decoder will read; the last one exchanges the two."""

    def __init__(self, width: int, heads: int, last: bool) -> None:
        super().__init__()
        self.attention, self.feed, self.last = Attention(width, heads), FeedForward(width), last

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` encoded."""
        x = self.feed(self.attention(x, x))
        return (source, x) if self.last else (x, source)


class Decoder(nn.Module):
    """A block of the decoder, past which goes what the encoder gave."""

    def __init__(self, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.attention, self.cross = Attention(width, heads, words), Attention(width, heads)
        self.feed = FeedForward(width)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` decoded."""
        return self.feed(self.cross(self.attention(x, x), encoded)), encoded


class Mean(nn.Module):
    """The mean over the words, and logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        """What the encoder gave has been read."""
        return self.logits(x.mean(1))


def transformer(
    input_shape: tuple[int, ...], depth: int, width: int, vocabulary: int, heads: int = 8
) -> list[nn.Module]:
    """Encoder blocks, as many decoder blocks, the mean, logits."""
    words = input_shape[0]
    return [
        Words(words, width, vocabulary),
        *(Encoder(width, heads, last=n == depth - 1) for n in range(depth)),
        *(Decoder(width, heads, words) for _ in range(depth)),
        Mean(width),
    ]


class ResidualLSTM(nn.Module):
    """An LSTM and its projection, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)
        self.projection = nn.Linear(width, width // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x + self.projection(self.lstm(x)[0])


class LastWord(nn.Module):
    """Logits from the last word's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width // 2, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ten for every sentence."""
        return self.logits(x[:, -1])


def residual_lstm(input_shape: tuple[int, ...], depth: int, width: int, vocabulary: int) -> list[nn.Module]:
    """LSTMs with projections and skip connections."""
    return [nn.Embedding(vocabulary, width // 2), *(ResidualLSTM(width) for _ in range(depth)), LastWord(width)]


BUILDERS: dict[str, Callable[..., list[nn.Module]]] = {
    each.__name__: each for each in (dense, snn, vgg16, resnet152, transformer, residual_lstm)
}
