"""Texts with facts to be found again, made from a seed, of any length: records and dialogues.

    a tired porter carries wet coats to the north hall.
    locker Kov: 47.                                       a fact: key, then value
    ? locker Kov: 47.                                     a question: the same words, the same value

    10:42 Mara: the code of the red box is 47.            a fact: who said what, and when
    16:05 Nina: I know of the red box from Mara.          refers to an earlier fact
    ? Mara: the code of the red box is 47.

To answer is to find the key in the text above and to copy what follows it. The values are random,
so a model that forgets the beginning of its text must guess. (Associative recall: Arora et al.,
"Zoology: Measuring and Improving Recall in Efficient Language Models", 2023, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

from labsupport.training.tasks import words

T = TypeVar("T")
Ask = Literal["apart", "throughout"]
MARK = "? "  # before each question, so that a reader, and a model, can tell it from a statement
ROOM = 100  # characters for each fact, by default
NAMES = tuple(a + b + c for a in words.FIRST for b in words.VOWELS for c in words.LAST)
THINGS = tuple(f"{colour} {thing}" for thing in words.THINGS for colour in words.COLOURS)
SENTENCES = {
    "locker": "locker {thing}: ",
    "code": "the code of the {thing} is ",
    "place": "the {thing} is in room ",
    "who": "I know of the {thing} from ",
    "when": "we heard of the {thing} at ",
}
ROOMS = "ABCDEFGHJKLM"
SPEAKERS = 4
OPENS, CLOSES = 8 * 60, 20 * 60  # the day of a dialogue, in minutes
# Number of possible answers. "who" is not the speaker; "when" is any minute of the day.
WAYS = {"locker": 100, "code": 100, "place": len(ROOMS), "who": SPEAKERS - 1, "when": 12 * 60}
STAMP, NAME = len("09:40 "), len("Mara: ")


@dataclass(frozen=True)
class Question:
    """A question about a fact of a text, with its answer.

    Attributes:
        kind: "locker" in records; "code", "place", "who" or "when" in dialogues.
        prompt: what to write after the text: `"? " + evidence` is prompt and answer.
        answer: what comes next.
        chance: probability to guess right among the answers of this kind.
        evidence: the fact's characters [start, end) in the text, answer included.
        answered: where the text asks and answers the question itself: the answer's characters
            [start, end). None if it does not.
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
        """Characters [start, end) of the answers in the text: what to train on."""
        return [question.answered for question in self.questions if question.answered]


def records(
    length: int,
    *,
    seed: int,
    facts: int | None = None,
    questions: int | None = None,
    ask: Ask = "apart",
) -> FactDocument:
    """Make a list of records: which locker number belongs to a name, between lines of filler.

    Args:
        length: of the text in characters (ASCII, so bytes too), hit exactly.
        seed: 0 or more. Another one gives other names, numbers, places and filler.
        facts: number of names; None: one for each 100 characters, at most 2,000.
        questions: None: one for each fact.
        ask: "apart": the text holds facts only, each question is to be written after it.
            "throughout": the text asks and answers them itself, each somewhere after its fact, any
            number of times: for training, since each answer is then a label.

    Raises:
        ValueError: a negative seed; more facts than names or than `length` has room for; more
            questions than facts, unless asked throughout.

    >>> document = records(600, seed=0)
    >>> question = document.questions[0]
    >>> start, end = question.evidence
    >>> question.prompt + question.answer == "? " + document.text[start:end]
    True
    """
    dice = Dice(seed)
    number, asked = _counts(length, facts, questions, ask, len(NAMES))
    keys = dice.some(NAMES, number)
    planted = [_Fact("locker", key, f"{dice.below(100):02}") for key in keys]
    chosen = _chosen(dice, number, asked)
    needed = sum(fact.size for fact in planted)
    if ask == "throughout":
        needed += sum(len(MARK) + planted[i].size for i in chosen)
    filler = _filler(dice, _left(length, needed))
    text = _Text()
    for item in _spread(dice, _groups(planted, chosen, ask), filler):
        if isinstance(item, str):
            text.write(item)
        else:
            fact, asks = item
            (text.ask if asks else text.state)(fact)
    return text.document(planted, chosen, ask)


def dialogue(
    length: int,
    *,
    seed: int,
    facts: int | None = None,
    questions: int | None = None,
    ask: Ask = "apart",
) -> FactDocument:
    """Make a coherent talk of four speakers from 08:00 to 20:00, with facts spread evenly over it.

    "code" (a number of two digits) and "place" (one of 12 rooms) say something new; a third of the
    facts, "who" and "when", repeat who said that, or at what time.

    Args and Raises: as for `records`, with at most 512 facts.

    >>> document = dialogue(2000, seed=0)
    >>> len(document.text)
    2000
    """
    dice = Dice(seed)
    number, asked = _counts(length, facts, questions, ask, len(THINGS))
    names = dice.some(words.SPEAKERS, SPEAKERS)
    repeated = number // 3
    planted = []
    for thing in dice.some(THINGS, number - repeated):
        kind = dice.choose(("code", "place"))
        answer = dice.choose(ROOMS) if kind == "place" else f"{dice.below(100):02}"
        planted.append(_Fact(kind, thing, answer))
    for first in planted[:repeated]:
        kind = dice.choose(("who", "when"))
        answer = "Mara" if kind == "who" else "00:00"  # as long as the right one, known later
        planted.append(_Fact(kind, first.thing, answer, about=first))
    chosen = _chosen(dice, number, asked)

    opening = f"{dice.choose(words.SCENES).capitalize()}. {', '.join(names)}.\n"
    opening += f"08:00 {names[0]}: good morning, shall we begin?\n"
    needed = sum(map(len, (opening, words.NOON, words.EVENING)))
    needed += sum(STAMP + NAME + fact.size for fact in planted)
    if ask == "throughout":
        needed += sum(len(MARK) + NAME + planted[i].size for i in chosen)

    # A fact comes before the one that repeats it, and before the questions about it.
    groups = _groups(planted, chosen, ask)
    for i in range(repeated):
        later = groups[number - repeated + i]
        groups[i] = [groups[i][0], later[0], *groups[i][1:], *later[1:]]
    chatter, gap = _chatter(dice, _left(length, needed))
    talk = _Talk(dice, names, opening, length)
    for item in _spread(dice, groups[: number - repeated], chatter):
        if not isinstance(item, str) and item[1]:
            talk.ask(item[0])
        else:
            talk.turn(item if isinstance(item, str) else item[0])
    talk.daytime(CLOSES)
    talk.write(gap)
    return talk.document(planted, chosen, ask)


@dataclass
class _Fact:
    """A fact; who says it, when and where are known once the text is written."""

    kind: str
    thing: str
    answer: str
    about: _Fact | None = None  # the fact whose speaker or time this one repeats
    speaker: str = ""
    minute: int = 0
    evidence: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        """Characters with the newline; of a fact that nobody has said yet, without the speaker."""
        return len(f"{self.said()}{self.answer}.\n")

    def said(self) -> str:
        """The fact's words, those before the answer."""
        key = SENTENCES[self.kind].format(thing=self.thing)
        return f"{self.speaker}: {key}" if self.speaker else key


Item = tuple[_Fact, bool] | str  # a fact, or (with True) a question about it; or filler


class _Text:
    """The text as it grows."""

    def __init__(self, opening: str = "") -> None:
        self.parts, self.size = [opening], len(opening)
        self.answered: list[tuple[_Fact, tuple[int, int] | None]] = []

    def write(self, part: str) -> None:
        self.parts.append(part)
        self.size += len(part)

    def state(self, fact: _Fact, stamp: str = "") -> None:
        start = self.size + len(stamp)
        self.write(f"{stamp}{fact.said()}{fact.answer}.\n")
        fact.evidence = start, self.size - len(".\n")

    def ask(self, fact: _Fact) -> None:
        self.write(f"{MARK}{fact.said()}{fact.answer}.\n")
        end = self.size - len(".\n")
        self.answered.append((fact, (end - len(fact.answer), end)))

    def document(self, planted: list[_Fact], chosen: list[int], ask: Ask) -> FactDocument:
        asked = [(planted[i], None) for i in chosen] if ask == "apart" else self.answered
        questions = (
            Question(f.kind, MARK + f.said(), f.answer, 1 / WAYS[f.kind], f.evidence, answered)
            for f, answered in asked
        )
        return FactDocument("".join(self.parts), tuple(questions))


class _Talk(_Text):
    """A dialogue as it grows: the last speaker, and what time it is."""

    def __init__(self, dice: Dice, names: list[str], opening: str, length: int) -> None:
        super().__init__(opening)
        self.dice, self.names, self.length, self.last = dice, names, length, names[0]
        self.pauses = [(12 * 60, words.NOON), (18 * 60, words.EVENING)]

    def turn(self, item: _Fact | str) -> None:
        """Write a turn that states a fact, or one that replies to the last speaker."""
        fact = None if isinstance(item, str) else item
        minute = self.minute(STAMP + NAME + (fact.size if fact else len(str(item))))
        self.daytime(minute)
        # Nobody answers himself, or repeats who said what he said.
        silent = {self.last, fact.about.speaker if fact and fact.about else ""}
        speaker = self.dice.choose([name for name in self.names if name not in silent])
        if fact is None:
            self.write(f"{_clock(minute)} {speaker}: {str(item).format(last=self.last)}")
        else:
            if fact.about:
                source = fact.about
                fact.answer = source.speaker if fact.kind == "who" else _clock(source.minute)
            fact.speaker, fact.minute = speaker, minute
            self.state(fact, f"{_clock(minute)} ")
        self.last = speaker

    def minute(self, size: int) -> int:
        """Draw the time of a turn of that many characters: the further on in the text, the later.

        Any minute of the turn's share: the lengths of the turns before it would give it away.
        """
        start, end = (
            OPENS + (CLOSES - OPENS) * min(at, self.length - 1) // self.length
            for at in (self.size, self.size + size)
        )
        return start + self.dice.below(max(end - start, 1))

    def daytime(self, minute: int) -> None:
        """Say that it is noon, or evening, once it is."""
        while self.pauses and minute >= self.pauses[0][0]:
            self.write(self.pauses.pop(0)[1])


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
        """Return one of 0 ... n - 1."""
        return int(self._random() * n)

    def choose(self, options: Sequence[T]) -> T:
        """Return one of them."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` different ones of them, in random order (Fisher and Yates)."""
        left = list(options)
        for i in range(count):
            j = i + self.below(len(left) - i)
            left[i], left[j] = left[j], left[i]
        return left[:count]


def _counts(
    length: int, facts: int | None, questions: int | None, ask: Ask, most: int
) -> tuple[int, int]:
    """Return the number of facts and of questions."""
    if ask not in ("apart", "throughout"):
        raise ValueError(f'ask is "apart" or "throughout", not {ask!r}')
    facts = min(max(length // ROOM, 1), most) if facts is None else facts
    questions = facts if questions is None else questions
    if not 1 <= facts <= most:
        raise ValueError(f"facts is 1 to {most}, as many as there are keys, not {facts}")
    if questions < 0 or (ask == "apart" and questions > facts):
        raise ValueError(
            f"questions is 0 to {facts}, since each fact is asked about once, not {questions}. "
            'ask="throughout" asks more often'
        )
    return facts, questions


def _left(length: int, needed: int) -> int:
    if needed > length:
        raise ValueError(
            f"a text of {length} characters has no room for these facts and questions, which take "
            f"{needed}: ask for a longer text, or for fewer of them (facts=, questions=)"
        )
    return length - needed


def _chosen(dice: Dice, facts: int, questions: int) -> list[int]:
    """Choose the facts to ask about: each one before any is asked about again."""
    chosen: list[int] = []
    while len(chosen) < questions:
        chosen += dice.some(range(facts), min(facts, questions - len(chosen)))
    return chosen


def _groups(planted: list[_Fact], chosen: list[int], ask: Ask) -> list[list[Item]]:
    """Return what must stay in order: each fact, then the questions about it."""
    groups: list[list[Item]] = [[(fact, False)] for fact in planted]
    for i in chosen if ask == "throughout" else ():
        groups[i].append((planted[i], True))
    return groups


def _spread(dice: Dice, groups: list[list[Item]], others: Sequence[str]) -> list[Item]:
    """Shuffle all items, but keep the order within each group.

    A group of one lands anywhere, with equal probability. So the facts are spread evenly over the
    text, unless questions that must come after them push them to the front.
    """
    total = sum(map(len, groups)) + len(others)
    free = dice.some(range(total), total)
    slots: dict[int, Item] = {}
    for group in [*groups, *([other] for other in others)]:
        own = sorted(free.pop() for _ in group)
        slots.update(zip(own, group, strict=True))
    return [slots[i] for i in range(total)]


def _filler(dice: Dice, length: int) -> list[str]:
    """Make lines of exactly that many characters together, without capitals and digits."""
    lines: list[str] = []
    while length:
        line = (
            f"a {dice.choose(words.MOODS)} {dice.choose(words.PEOPLE)} {dice.choose(words.DEEDS)} "
            f"{dice.choose(words.GOODS)} by the {dice.choose(words.PLACES)}.\n"
        )
        if len(line) > length - 4:  # the last line: what is left
            line = _words(dice, length - 2) + ".\n"[-length:]
        lines.append(line)
        length -= len(line)
    return lines


def _chatter(dice: Dice, length: int) -> tuple[list[str], str]:
    """Make turns that state no fact, and a last line: exactly that many characters together."""
    turns: list[str] = []
    while True:
        turn = f"{dice.choose(words.REPLIES)}; {dice.choose(words.REMARKS)}.\n"
        size = STAMP + NAME + len(turn.format(last="Mara"))
        if size > length - 4:
            break
        turns.append(turn)
        length -= size
    if length < 4:
        return turns, ".."[: max(length - 1, 0)] + "\n" * bool(length)
    return turns, f"({_words(dice, length - 3)})\n"


def _words(dice: Dice, length: int) -> str:
    """Return words that fill exactly that many characters."""
    chosen: list[str] = []
    while length > 0:
        options = [w for w in words.SHORT if len(w) == length or len(w) <= length - 2]
        chosen.append(dice.choose(options))
        length -= len(chosen[-1]) + 1
    return " ".join(chosen)


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
