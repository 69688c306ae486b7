"""What the generators share: dice that fall alike on every Python, filler, and where facts go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

from labsupport.training.documents.words import SHORT

T = TypeVar("T")
Ask = Literal["apart", "throughout", "at_end"]
# In front of each question, so that a reader, and a model, can tell it from a statement.
MARK = "? "
# How many characters there are for each fact, unless the caller says how many facts there are.
ROOM = 100


@dataclass(frozen=True)
class Question:
    """A question about a fact of a text, with its answer.

    Attributes:
        kind: "locker" in records; "code", "place", "who" or "when" in dialogues.
        prompt: what to write behind the text. It ends in the words that precede the answer in the
            evidence: `"? " + evidence` is prompt and answer.
        answer: what comes next.
        chance: how probable it is to guess right among the answers that this kind can have.
        evidence: where in the text the fact stands, answer included: characters [start, end).
        answered: where in the text the question is asked and answered: the answer's characters
            [start, end). None if the text does not ask it.
    """

    kind: str
    prompt: str
    answer: str
    chance: float
    evidence: tuple[int, int]
    answered: tuple[int, int] | None = None


@dataclass(frozen=True)
class FactDocument:
    """A text with facts planted in it, and questions about them.

    Attributes:
        text: ends in a newline, so that a prompt can follow.
        questions: in the order in which they are asked; in random order if asked apart.
    """

    text: str
    questions: tuple[Question, ...]

    @property
    def answers(self) -> list[tuple[int, int]]:
        """The characters [start, end) of the answers that stand in the text: what to train on."""
        return [question.answered for question in self.questions if question.answered]


class Dice:
    """Random choices from a seed, the same on every version of Python.

    Only `Random.random` is used: of Python's generator it alone is promised to stay as it is
    (https://docs.python.org/3/library/random.html, "Notes on Reproducibility").

    Raises:
        ValueError: the seed is negative: Python takes -1 for 1.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"a seed is 0 or more, not {seed}")
        self._random = Random(seed).random

    def below(self, n: int) -> int:
        """One of 0 ... n - 1."""
        return int(self._random() * n)

    def choose(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different ones of them, in random order (Fisher and Yates)."""
        left = list(options)
        for i in range(count):
            j = i + self.below(len(left) - i)
            left[i], left[j] = left[j], left[i]
        return left[:count]


def counts(
    length: int, facts: int | None, questions: int | None, ask: Ask, most: int
) -> tuple[int, int]:
    """How many facts are planted, and how many questions are asked.

    Raises:
        ValueError: fewer than one fact, more than there are keys for, or more questions than facts
            where each can be asked once only.
    """
    if ask not in ("apart", "throughout", "at_end"):
        raise ValueError(f'ask is "apart", "throughout" or "at_end", not {ask!r}')
    if facts is None:
        facts = min(max(length // ROOM, 1), most)
    if not 1 <= facts <= most:
        raise ValueError(f"facts is 1 to {most}, as many as there are keys, not {facts}")
    if questions is None:
        questions = facts
    if questions < 0 or (ask != "throughout" and questions > facts):
        raise ValueError(
            f"questions is 0 to {facts}, since each fact is asked about once, not {questions}. "
            'ask="throughout" asks more often'
        )
    return facts, questions


def asked(dice: Dice, facts: int, questions: int) -> list[int]:
    """Which facts are asked about: each one before any is asked about again."""
    chosen: list[int] = []
    while len(chosen) < questions:
        chosen += dice.some(range(facts), min(facts, questions - len(chosen)))
    return chosen


def spread(dice: Dice, groups: list[list[T]], others: Sequence[T]) -> list[T]:
    """All of them in random order, but what is in one group stays in its own order.

    A group of one lands anywhere, with equal probability. So the facts are spread evenly over the
    text, unless questions that must come after them push them to the front.
    """
    total = sum(map(len, groups)) + len(others)
    free = dice.some(range(total), total)
    slots: dict[int, T] = {}
    for group in [*groups, *([other] for other in others)]:
        mine = sorted(free.pop() for _ in group)
        slots.update(zip(mine, group, strict=True))
    return [slots[i] for i in range(total)]


def words_of(dice: Dice, length: int) -> str:
    """Words that fill exactly that many characters."""
    words: list[str] = []
    while length > 0:
        word = dice.choose([w for w in SHORT if len(w) == length or len(w) <= length - 2])
        words.append(word)
        length -= len(word) + 1
    return " ".join(words)


def too_short(length: int, needed: int) -> ValueError:
    """The error for a text in which the facts and questions have no room."""
    return ValueError(
        f"a text of {length} characters has no room for these facts and questions, which take "
        f"{needed}: ask for a longer text, or for fewer of them (facts=, questions=)"
    )
