"""What is trained: a model, its batches and its loss; nothing about optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import load_digits, load_text, shift_images

__all__ = ["DeepDigitsTask", "DigitsTask", "LanguageTask", "Task", "mean_loss"]

Batch = tuple[Tensor, Tensor]  # inputs and labels


class Task(Protocol):
    """Something to train."""

    def make_model(self) -> nn.Module:
        """A new model, from torch's global random numbers."""
        ...

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """This rank's batches, for ever."""
        ...

    def held_out(self) -> Batch:
        """What is never trained on."""
        ...


class LanguageTask:
    """A word-level neural language model (Bengio et al. 2003) of the King James Bible, 1.1M parameters.

    Four words predict the fifth. The words read are all that the text has, so the embedding has rows that are used
    rarely, not before the freeze, or never. The words predicted are the most frequent ones and "another": a softmax
    over all would take most of the time.
    """

    def __init__(
        self, *, batch_size: int, num_features: int = 72, num_hidden: int = 128, num_classes: int = 2048
    ) -> None:
        self._text = load_text()
        self._batch_size = batch_size
        self._num_features = num_features
        self._num_hidden = num_hidden
        self._num_classes = num_classes

    def make_model(self) -> nn.Module:
        features = self._num_features
        return nn.Sequential(
            *(nn.Embedding(self._text.num_words, features), nn.Flatten()),
            *(nn.Linear(_CONTEXT * features, self._num_hidden), nn.ReLU()),
            nn.Linear(self._num_hidden, features),
            nn.Linear(features, self._num_classes),
        )

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed * size + rank)
        while True:
            starts = torch.randint(len(self._text.train) - _CONTEXT, (self._batch_size, 1), generator=generator)
            yield self._windows(self._text.train, starts)

    def held_out(self) -> Batch:
        text = self._text.held_out
        return self._windows(text, torch.arange(0, len(text) - _CONTEXT, 7).unsqueeze(1))

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts + torch.arange(_CONTEXT + 1)]
        # the more frequent the word, the smaller its number
        return windows[:, :_CONTEXT], windows[:, _CONTEXT].clamp(max=self._num_classes - 1)


_CONTEXT = 4


class DigitsTask:
    """MNIST digits, moved at random, and a small convolutional network of 20,696 parameters."""

    def __init__(self, *, batch_size: int, most_shift: int) -> None:
        self._digits = load_digits()
        self._batch_size = batch_size
        self._most_shift = most_shift

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, kernel_size=5, stride=2, padding=2), nn.ReLU()),
            *(nn.Conv2d(8, 16, kernel_size=5, stride=3, padding=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * 5 * 5, 42), nn.ReLU()),
            nn.Linear(42, 10),
        )

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        images, labels = self._digits.train
        generator = torch.Generator().manual_seed(seed * size + rank)
        while True:
            chosen = torch.randint(len(labels), (self._batch_size,), generator=generator)
            yield shift_images(images[chosen], self._most_shift, generator), labels[chosen]

    def held_out(self) -> Batch:
        return self._digits.held_out


class DeepDigitsTask(DigitsTask):
    """MNIST digits, moved at random, and a fully connected network of six layers, 167,818 parameters.

    Without normalisation or shortcuts its layers need learning rates that fit their norms, which is what LAMB is for.
    """

    def make_model(self) -> nn.Module:
        sizes = (28 * 28, *_HIDDEN_SIZES)
        hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], 10))


_HIDDEN_SIZES = (128,) * 5


def mean_loss(model: nn.Module, batch: Batch) -> float:
    """The cross-entropy over all of `batch`, in pieces that fit the cache."""
    inputs, labels = batch
    total = 0.0
    with torch.no_grad():
        for some, theirs in zip(inputs.split(512), labels.split(512), strict=True):
            total += float(F.cross_entropy(model(some), theirs, reduction="sum"))
    return total / len(labels)
