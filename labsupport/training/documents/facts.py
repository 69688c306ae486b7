"""Records: lines of text, among them facts to be found again, of any length and from a seed.

    a tired porter carries wet coats to the north hall.
    locker Kov: 47.                                       a fact: key, then value
    a busy clerk counts tin cups by the main gate.
    ? locker Kov: 47.                                     a question: the same words, the same value

To answer is to find the key in the text above and to copy what stands behind it. This is the
smallest task that needs attention over the whole text: the values are random, so no model can know
them, and one that forgets the beginning of its text must guess. (Associative recall; such tasks
tell architectures apart in Arora et al., "Zoology: Measuring and Improving Recall in Efficient
Language Models", 2023, section 3.) Small models learn it: keys are short, recur letter by letter,
and stand right before their values, and nothing else in the text looks like one.
"""

from __future__ import annotations

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

NAMES = tuple(a + b + c for a in words.FIRST for b in words.VOWELS for c in words.LAST)


def records(
    length: int,
    *,
    seed: int,
    facts: int | None = None,
    questions: int | None = None,
    ask: Ask = "apart",
    digits: int = 2,
) -> FactDocument:
    """A text of records with facts spread evenly over it: which locker number belongs to a name.

    Args:
        length: of the text, in characters (all ASCII: bytes too). It is hit exactly.
        seed: 0 or more. Another one gives other names, numbers, places and filler.
        facts: how many names; None: one for each 100 characters, at most 2,000.
        questions: how many; None: one for each fact.
        ask: "apart": the text holds facts only, each question is to be written behind it.
            "throughout": the text asks and answers them itself, each somewhere after its fact,
            any number of times: for training, since each answer is then a label. Facts stand nearer
            to the front there. "at_end": the text asks and answers them behind all facts.
        digits: of a locker's number: the chance to guess it is 10^-digits.

    Raises:
        ValueError: a negative seed; more facts than names or than `length` has room for; more
            questions than facts, unless asked throughout; digits below 1.

    >>> document = records(600, seed=0)
    >>> question = document.questions[0]
    >>> start, end = question.evidence
    >>> question.prompt + question.answer == "? " + document.text[start:end]
    True
    """
    if digits < 1:
        raise ValueError(f"digits is 1 or more, not {digits}")
    dice = Dice(seed)
    facts, questions = counts(length, facts, questions, ask, len(NAMES))
    keys = [f"locker {name}: " for name in dice.some(NAMES, facts)]
    values = [f"{dice.below(10**digits):0{digits}}" for _ in keys]
    lines = [f"{key}{value}.\n" for key, value in zip(keys, values, strict=True)]
    chosen = asked(dice, facts, questions)

    needed = sum(map(len, lines))
    if ask != "apart":
        needed += sum(len(MARK + lines[fact]) for fact in chosen)
    if needed > length:
        raise too_short(length, needed)

    # What is written: (fact, whether as a question), or a line of filler.
    groups: list[list[tuple[int, bool] | str]] = [[(fact, False)] for fact in range(facts)]
    if ask == "throughout":
        for fact in chosen:
            groups[fact].append((fact, True))
    order = spread(dice, groups, _filler(dice, length - needed))
    if ask == "at_end":
        order += [(fact, True) for fact in chosen]

    text, size, evidence, found = [], 0, {}, []
    for item in order:
        fact, question = (None, False) if isinstance(item, str) else item
        text.append(item if isinstance(item, str) else MARK * question + lines[item[0]])
        size += len(text[-1])
        end = size - len(".\n")  # of the value
        if fact is None:
            continue
        if question:
            found.append((fact, (end - digits, end)))
        else:
            evidence[fact] = (end - digits - len(keys[fact]), end)
    if ask == "apart":
        found = [(fact, None) for fact in chosen]
    return FactDocument(
        "".join(text),
        tuple(
            Question("locker", MARK + keys[f], values[f], 1 / 10**digits, evidence[f], answered)
            for f, answered in found
        ),
    )


def _filler(dice: Dice, length: int) -> list[str]:
    """Lines of exactly that many characters together, without capitals and digits."""
    lines: list[str] = []
    while length:
        line = (
            f"a {dice.choose(words.MOODS)} {dice.choose(words.PEOPLE)} {dice.choose(words.DEEDS)} "
            f"{dice.choose(words.GOODS)} by the {dice.choose(words.PLACES)}.\n"
        )
        if len(line) > length - 4:  # the last line: what is left
            line = words_of(dice, length - 2) + ".\n"[-length:]
        lines.append(line)
        length -= len(line)
    return lines
