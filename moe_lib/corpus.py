"""A text of eight kinds, written by seeded code, so that the kind of every token is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

MONTHS = "January February March April May June July August September October November December".split()
RIMES = "ight own air ell ing oat ump ake".split()
ONSETS = "b d f h l m n p r s t w br cl st tr".split()
MORSE = dict(zip("ETAIMNSOURDKGW", ". - .- .. -- -. ... --- ..- .-. -.. -.- --. .--".split()))
PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
PARTNER = dict(zip("ACGT", "TGCA"))

LENGTH = 96
"""Tokens of a row: a document and its padding."""
PAD = 0
VOCABULARY = 128


class Dice:
    """Draws from random.Random(seed).random() alone: the one method that Python promises to keep as it is between versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def pick(self, things: Sequence[str]) -> str:
        return things[self.below(len(things))]


def sums(dice: Dice) -> str:
    a, b = dice.below(100), dice.below(100)
    return f"{a}+{b}={a + b}"


def brackets(dice: Dice) -> str:
    out, open_ = [], []
    for left in range(2 * (2 + dice.below(5)), 0, -1):
        if not open_ or (len(open_) < left and dice.below(2)):
            open_.append(dice.pick("([{<"))
            out.append(open_[-1])
        else:
            out.append(PAIRS[open_.pop()])
    return "".join(out)


def dates(dice: Dice) -> str:
    year, month, day = 1900 + dice.below(130), dice.below(12), 1 + dice.below(28)
    return f"{day} {MONTHS[month]} {year} is {year}-{month + 1:02}-{day:02}."


def rhymes(dice: Dice) -> str:
    rime = dice.pick(RIMES)
    return ", ".join(dice.pick(ONSETS) + rime for _ in range(3))


def genes(dice: Dice) -> str:
    strand = "".join(dice.pick("ACGT") for _ in range(6))
    return f"{strand}|{''.join(PARTNER[base] for base in strand)}"


def code(dice: Dice) -> str:
    x, y, n = dice.pick("ijk"), dice.pick("xyz"), dice.below(10)
    return dice.pick([f"for {x} in range({n}): {y} += {x};", f"if {y} > {n}: {y} -= {n};", f"{y} = {y}*{n} + {x};"])


def morse(dice: Dice) -> str:
    word = "".join(dice.pick("ETAIMNSOURDKGW") for _ in range(4))
    return f"{word}: {' '.join(MORSE[letter] for letter in word)}"


def romans(dice: Dice) -> str:
    number = 1 + dice.below(399)
    rest, out = number, ""
    for value, letters in zip((100, 90, 50, 40, 10, 9, 5, 4, 1), "C XC L XL X IX V IV I".split()):
        out, rest = out + letters * (rest // value), rest % value
    return f"{out}={number}"


WRITERS: tuple[Callable[[Dice], str], ...] = (sums, brackets, dates, rhymes, genes, code, morse, romans)
KINDS = tuple(writer.__name__ for writer in WRITERS)


def write(dice: Dice, kind: int) -> str:
    """One document of 40 to LENGTH characters: phrases of one kind, each after a space, between two newlines."""
    size, text = 40 + dice.below(LENGTH - 40), "\n"
    while len(text) < size:
        phrase = WRITERS[kind](dice) + " "
        if len(text) + len(phrase) > LENGTH:
            break
        text += phrase
    return text[:-1] + "\n"


@dataclass(frozen=True)
class Documents:
    """Rows of token numbers, one document a row, padded with 0 on the right."""

    tokens: Int64[Tensor, "documents length"]
    kinds: Int64[Tensor, " documents"]
    """Of each document, the place of its kind in KINDS."""

    @property
    def mask(self) -> Bool[Tensor, "documents length"]:
        """False where there is padding."""
        return self.tokens != PAD

    @property
    def token_kinds(self) -> Int64[Tensor, "documents length"]:
        return self.kinds.unsqueeze(1).expand_as(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Int64[Tensor, " some"] | Bool[Tensor, " documents"] | slice) -> Documents:
        return Documents(self.tokens[rows], self.kinds[rows])

    def to(self, device: torch.device | str) -> Documents:
        return Documents(self.tokens.to(device), self.kinds.to(device))


def encode(text: str) -> list[int]:
    """A character's token is its ASCII code. Raises UnicodeEncodeError for any other character."""
    return list(text.encode("ascii"))


def decode(tokens: Int64[Tensor, " tokens"]) -> str:
    """The text again, without its padding."""
    return bytes(tokens[tokens != PAD].tolist()).decode("ascii")


def make_corpus(seed: int = 0, train: int = 9600, held_out: int = 512) -> tuple[Documents, Documents]:
    """(training, held-out) documents, of kinds drawn by lot. No text is written twice, so none is in both.

    The training documents do not depend on how many are held out.
    """
    dice, texts = Dice(seed), {}
    while len(texts) < train + held_out:
        kind = dice.below(len(KINDS))
        texts.setdefault(write(dice, kind), kind)
    tokens = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, text in zip(tokens, texts):
        row[: len(text)] = torch.tensor(encode(text))
    everything = Documents(tokens, torch.tensor(list(texts.values())))
    return everything[:train], everything[train:]
