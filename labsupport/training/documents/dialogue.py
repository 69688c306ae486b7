"""Dialogues: several speakers, from morning to night, who tell one another facts.

    10:42 Mara: the code of the red box is 47.            a fact: who said what, and when
    10:47 Otto: thank you, Mara, I wrote that down.
    16:05 Nina: I know of the red box from Mara.          refers to what was said before
    ? Mara: the code of the red box is 47.                a question: the fact's own words

The task is that of the records (facts.py) in plainer English: several words make the key, the same
things are named in other turns too, and there are four kinds of answers. So it is harder to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labsupport.training.documents import words
from labsupport.training.documents.planting import (
    MARK,
    Ask,
    Dice,
    FactDocument,
    Question,
    asked,
    counts,
    spread,
    too_short,
    words_of,
)

SENTENCES = {
    "code": "the code of the {thing} is ",
    "place": "the {thing} is in room ",
    "who": "I know of the {thing} from ",
    "when": "we heard of the {thing} at ",
}
ROOMS = "ABCDEFGHJKLM"
THINGS = tuple(f"{colour} {thing}" for thing in words.THINGS for colour in words.COLOURS)
OPENS, CLOSES = 8 * 60, 20 * 60  # the day, in minutes
STAMP, NAME = len("09:40 "), len("Mara: ")


@dataclass
class _Fact:
    """A fact; who says it, when and where are known once the text is written."""

    kind: str
    thing: str
    answer: str = ""
    speaker: str = ""
    minute: int = 0
    evidence: tuple[int, int] = (0, 0)
    about: _Fact | None = None  # the fact whose speaker or time this one repeats

    @property
    def sentence(self) -> str:
        return SENTENCES[self.kind].format(thing=self.thing)

    @property
    def size(self) -> int:
        """Characters of "Mara: the code of the red box is 47.", with the newline."""
        answer = {"code": 2, "place": 1, "who": 4, "when": 5}[self.kind]
        return NAME + len(self.sentence) + answer + len(".\n")


def dialogue(
    length: int,
    *,
    seed: int,
    facts: int | None = None,
    questions: int | None = None,
    ask: Ask = "apart",
    speakers: int = 4,
    kinds: Sequence[str] = ("code", "place", "who", "when"),
) -> FactDocument:
    """A coherent talk from 08:00 to 20:00 with facts spread evenly over it.

    Args:
        length: of the text, in characters (all ASCII: bytes too). It is hit exactly.
        seed: 0 or more. Another one gives another talk.
        facts: how many turns state one; None: one for each 100 characters, at most 512.
        questions, ask: as in `records`.
        speakers: how many, 3 to 10.
        kinds: of facts. "code" (a number of two digits) and "place" (one of 12 rooms) say something
            new; "who" and "when" repeat who said that, or at what time. A third of the facts
            repeat another, if both sorts are wanted.

    Raises:
        ValueError: as `records`; too few or too many speakers; kinds that are not known, or none
            that says something new.
    """
    if not 3 <= speakers <= len(words.SPEAKERS):
        raise ValueError(f"speakers is 3 to {len(words.SPEAKERS)}, not {speakers}")
    new, repeats = (
        [k for k in kinds if k in pair] for pair in (("code", "place"), ("who", "when"))
    )
    if not new or set(kinds) - set(SENTENCES):
        raise ValueError(
            f'kinds are of {", ".join(SENTENCES)}, with "code" or "place": not {kinds}'
        )
    dice = Dice(seed)
    number, questions = counts(length, facts, questions, ask, len(THINGS))
    names = dice.some(words.SPEAKERS, speakers)

    repeated = number // 3 if repeats else 0
    planted = []
    for thing in dice.some(THINGS, number - repeated):
        kind = dice.choose(new)
        answer = dice.choose(ROOMS) if kind == "place" else f"{dice.below(100):02}"
        planted.append(_Fact(kind, thing, answer))
    for first in planted[:repeated]:
        planted.append(_Fact(dice.choose(repeats), first.thing, about=first))
    chosen = asked(dice, number, questions)

    opening = f"{dice.choose(words.SCENES).capitalize()}. {', '.join(names)}.\n"
    greeting = f"08:00 {names[0]}: good morning, shall we begin?\n"
    inside = 0 if ask == "apart" else sum(len(MARK) + planted[fact].size for fact in chosen)
    needed = sum(map(len, (opening, greeting, words.NOON, words.EVENING))) + inside
    needed += sum(STAMP + fact.size for fact in planted)
    if needed > length:
        raise too_short(length, needed)

    # A fact comes before the one that repeats it, and before the questions about it.
    groups: list[list[tuple[_Fact, bool] | str]] = [[(fact, False)] for fact in planted]
    if ask == "throughout":
        for i in chosen:
            groups[i].append((planted[i], True))
    for i in range(repeated):
        later = groups[number - repeated + i]
        groups[i] = [groups[i][0], later[0], *groups[i][1:], *later[1:]]
    groups = groups[: number - repeated]
    chatter, gap = _chatter(dice, length - needed)
    order = spread(dice, groups, chatter)
    ending: list[tuple[_Fact, bool] | str] = []
    if ask == "at_end":
        ending = [(planted[i], True) for i in chosen]

    talk = _Talk(dice, names, opening + greeting, length - (inside if ending else 0))
    for item in order:
        talk.say(item)
    talk.daytime(CLOSES)
    talk.write(gap)
    for item in ending:
        talk.say(item)
    found = talk.answered if ask != "apart" else [(planted[i], None) for i in chosen]
    return FactDocument(
        "".join(talk.parts), tuple(_question(f, where, speakers) for f, where in found)
    )


class _Talk:
    """The text as it grows: whose turn it is, and what time."""

    def __init__(self, dice: Dice, names: list[str], opening: str, length: int) -> None:
        self.dice, self.names, self.length = dice, names, length
        self.parts, self.size, self.last = [opening], len(opening), names[0]
        self.answered: list[tuple[_Fact, tuple[int, int] | None]] = []
        self.pauses = [(12 * 60, words.NOON), (18 * 60, words.EVENING)]

    def say(self, item: tuple[_Fact, bool] | str) -> None:
        """Write a question, a turn that states a fact, or a turn that replies to the last one."""
        if not isinstance(item, str) and item[1]:
            fact = item[0]
            self.write(f"{MARK}{fact.speaker}: {fact.sentence}{fact.answer}.\n")
            end = self.size - len(".\n")
            self.answered.append((fact, (end - len(fact.answer), end)))
            return
        fact = None if isinstance(item, str) else item[0]
        minute = self.minute(STAMP + (fact.size if fact else NAME + len(str(item))))
        self.daytime(minute)
        # Nobody answers himself, or repeats who said what he said.
        silent = {self.last, fact.about.speaker if fact and fact.about else ""}
        speaker = self.dice.choose([name for name in self.names if name not in silent])
        start = self.size + STAMP
        if fact is None:
            said = str(item).format(last=self.last)
        else:
            if fact.about:
                fact.answer = (
                    fact.about.speaker if fact.kind == "who" else _clock(fact.about.minute)
                )
            fact.speaker, fact.minute, said = speaker, minute, f"{fact.sentence}{fact.answer}.\n"
            fact.evidence = start, start + fact.size - len(".\n")
        self.write(f"{_clock(minute)} {speaker}: {said}")
        self.last = speaker

    def minute(self, size: int) -> int:
        """When a turn of that many characters is said: the further on in the text, the later."""
        start, end = (
            OPENS + (CLOSES - OPENS) * min(at, self.length - 1) // self.length
            for at in (self.size, self.size + size)
        )
        # Any minute of the turn's share: how long the turns before it are would give it away.
        return start + self.dice.below(max(end - start, 1))

    def write(self, part: str) -> None:
        """Add to the text."""
        self.parts.append(part)
        self.size += len(part)

    def daytime(self, minute: int) -> None:
        """Say that it is noon, or evening, once it is."""
        while self.pauses and minute >= self.pauses[0][0]:
            self.write(self.pauses.pop(0)[1])


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _chatter(dice: Dice, length: int) -> tuple[list[str], str]:
    """Turns that state no fact, and a last line: together exactly that many characters."""
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
    return turns, f"({words_of(dice, length - 3)})\n"


def _question(fact: _Fact, answered: tuple[int, int] | None, speakers: int) -> Question:
    # Of "who": not the one who says it. Of "when": any minute of the day.
    ways = {"code": 100, "place": len(ROOMS), "who": speakers - 1, "when": CLOSES - OPENS}[
        fact.kind
    ]
    prompt = f"{MARK}{fact.speaker}: {fact.sentence}"
    return Question(fact.kind, prompt, fact.answer, 1 / ways, fact.evidence, answered)
