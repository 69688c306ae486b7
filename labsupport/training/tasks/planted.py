"""Facts planted into a real document, and what answers questions about them without a model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLACES = re.findall(
    r"\w+",
    "harbour museum station theatre bakery hospital castle lighthouse chapel brewery market school "
    "prison garden mill bridge tower farm",
)
WORDS = re.findall(
    r"\w+",
    "tiger rabbit eagle wolf horse spider dragon lion bear fox snake monkey whale goat turtle "
    "sheep crow deer",
)
RELATIONS = re.findall(
    r"\w+",
    "password mascot emblem nickname codename statue guardian pet flag seal totem costume logo "
    "crest riddle painting",
)
# The question is the fact's own beginning, and no two facts begin alike: a model of this size finds
# what is said in the same words, and mixes up facts that differ in one word alone.
QUESTION = "The {relation} of the {place} is"
FACT = QUESTION + " {word}."


@dataclass(frozen=True)
class Fact:
    """A planted sentence: what it says, and the characters [start, end) where it stands."""

    relation: str
    place: str
    word: str
    start: int
    end: int

    @property
    def question(self) -> str:
        """The sentence without its last word."""
        return QUESTION.format(relation=self.relation, place=self.place)


@dataclass(frozen=True)
class Planted:
    """A document with facts, in their order. Each word that one of them gives is a candidate."""

    text: str
    facts: tuple[Fact, ...]

    @property
    def candidates(self) -> list[str]:
        """The words that the facts give, each once: to guess is right once in so many times."""
        return [fact.word for fact in self.facts]


def plant(
    tokenizer: Any, text: str, *, length: int = 2048, facts: int = 12, seed: int = 0
) -> Planted:
    """Plant facts between the paragraphs of a real document, evenly from its beginning to its end.

    Args:
        tokenizer: counts tokens.
        text: paragraphs, an empty line between them.
        length: the document is cut, at a paragraph, so that it has at most so many tokens.
        facts: how many; their words are drawn from fixed lists, without those of the text.
        seed: of the draw.

    Raises:
        ValueError: a text of too few paragraphs; more facts than there are words for.
    """
    # What the text says itself would be a second answer.
    lists = [[word for word in known if word not in text] for known in (RELATIONS, PLACES, WORDS)]
    if not 2 <= facts <= min(map(len, lists)):
        raise ValueError(
            f"facts is 2 to {min(map(len, lists))} in this text, which has some of the words "
            f"already; not {facts}"
        )
    draw = random.Random(seed)
    drawn = list(zip(*(draw.sample(known, facts) for known in lists), strict=True))
    sentences = [FACT.format(relation=of, place=place, word=word) for of, place, word in drawn]

    def tokens(part: str) -> int:
        return len(tokenizer.encode(part + "\n\n", add_special_tokens=False, verbose=False))

    room = length - sum(map(tokens, sentences))
    paragraphs = []
    for paragraph in text.split("\n\n"):
        room -= tokens(paragraph)
        if room < 0:
            break
        paragraphs.append(paragraph)
    if len(paragraphs) < facts:
        raise ValueError(
            f"{len(paragraphs)} paragraphs fit into {length} tokens: too few for {facts} facts"
        )
    written, found = "", []
    # Behind the paragraphs at 1/2n, 3/2n, 5/2n ... of the document.
    behind = {int((i + 0.5) * len(paragraphs) / facts): i for i in range(facts)}
    for number, paragraph in enumerate(paragraphs):
        written += paragraph + "\n\n"
        if number in behind:
            sentence = sentences[behind[number]]
            end = len(written) + len(sentence)
            found.append(Fact(*drawn[behind[number]], start=len(written), end=end))
            written += sentence + "\n\n"
    return Planted(written, tuple(found))


def sentences_of(text: str) -> list[tuple[int, int]]:
    """The sentences of a text as characters [start, end): up to a sign that ends one, or a gap."""
    pattern = r"\S.*?(?:[.:!?](?=\s)|(?=\n\s*\n)|\Z)"
    return [match.span() for match in re.finditer(pattern, text, re.DOTALL)]


def search_answer(question: str, text: str, candidates: Sequence[str]) -> str | None:
    """What a search finds: the candidate in the sentence that shares most words with the question.

    The latest of equally good sentences; None if it holds no candidate.
    """
    asked = set(_words(question))
    best = max(
        reversed([text[start:end] for start, end in sentences_of(text)]),
        key=lambda sentence: len(asked & set(_words(sentence))),
        default="",
    )
    return latest_candidate(best, candidates)


def latest_candidate(text: str, candidates: Sequence[str]) -> str | None:
    """The candidate that stands last in a text; None if it holds none."""
    found = [word for word in _words(text) if word in candidates]
    return found[-1] if found else None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
