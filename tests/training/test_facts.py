"""Texts with facts planted in them: each question has one answer, and the text gives it."""

import hashlib
import re

import pytest

from labsupport.training.tasks.facts import Dice, _words, dialogue, records

of_each_kind = pytest.mark.parametrize("make", [records, dialogue])

STATEMENTS = {
    "locker": r"locker (?P<key>[A-Z]\w\w): (?P<value>\d+)",
    "code": r"the code of the (?P<key>\w+ \w+) is (?P<value>\d\d)",
    "place": r"the (?P<key>\w+ \w+) is in room (?P<value>[A-Z])",
    "who": r"I know of the (?P<key>\w+ \w+) from (?P<value>\w+)",
    "when": r"we heard of the (?P<key>\w+ \w+) at (?P<value>\d\d:\d\d)",
}


def statements(text):
    """(kind, key, value, time, speaker) of each line that states a fact; not of questions."""
    for line in text.splitlines():
        turn = re.fullmatch(r"(?:(\d\d:\d\d) (\w+): )?(.*)\.", line)
        for kind, pattern in STATEMENTS.items():
            if turn and (fact := re.fullmatch(pattern, turn[3])):
                yield kind, fact["key"], fact["value"], turn[1], turn[2]


def test_a_seed_gives_the_same_text_on_every_machine():
    for make, digest in ((records, "8fe0f686c7d059bd"), (dialogue, "8dc43c3339a41579")):
        text = make(4000, seed=1, facts=7, questions=24, ask="throughout").text
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@of_each_kind
@pytest.mark.parametrize("ask", ["apart", "throughout"])
def test_the_text_alone_gives_one_answer_to_each_question_in_its_words(make, ask):
    document = make(3000, seed=0, ask=ask)
    known = {}
    for kind, key, value, _, speaker in statements(document.text):
        known.setdefault((kind, key, speaker), set()).add(value)
    assert len(known) == len(document.questions) == 30
    assert len({(kind, key) for kind, key, _ in known}) == 30  # nor would another speaker
    ways = {"locker": 100, "code": 100, "place": 12, "who": 3, "when": 720}
    for question in document.questions:
        start, end = question.evidence
        assert question.prompt + question.answer == "? " + document.text[start:end]
        assert document.text[end] == "."
        said = re.fullmatch(r"\? (?:(\w+): )?(.*)", question.prompt + question.answer)
        key = re.fullmatch(STATEMENTS[question.kind], said[2])["key"]
        assert known[question.kind, key, said[1]] == {question.answer}
        assert not question.prompt.startswith(f"? {question.answer}:")
        assert question.chance == 1 / ways[question.kind]
        if question.answered:  # after its fact
            first, last = question.answered
            assert document.text[:last].endswith("\n" + question.prompt + question.answer)
            assert end < first - len(question.prompt)
    asked = 30 if ask == "throughout" else 0
    assert len(document.answers) == document.text.count("\n? ") == asked
    assert document.answers == sorted(document.answers)


@of_each_kind
def test_the_length_is_hit_exactly_in_ascii_lines(make):
    for length in range(1500, 1560):
        text = make(length, seed=length, facts=5).text
        assert (len(text), text.isascii(), text[-1]) == (length, True, "\n")
        assert max(map(len, text.splitlines())) < 130
    assert all(len(_words(Dice(0), n)) == n for n in range(1, 60))


@of_each_kind
def test_what_cannot_be_made_is_refused_with_a_way_out(make):
    for options, message in (
        ({"seed": -1}, "0 or more, not -1"),
        ({"facts": 0}, "not 0"),
        ({"facts": 5000}, "as many as there are keys, not 5000"),
        ({"facts": 3, "questions": 4}, r"once, not 4.*throughout"),
        ({"ask": "never"}, "not 'never'"),
        ({"facts": 100}, "has no room.*longer text"),
        ({"facts": 5, "questions": 90, "ask": "throughout"}, "has no room"),
    ):
        with pytest.raises(ValueError, match=message):
            make(1000, **{"seed": 0} | options)
