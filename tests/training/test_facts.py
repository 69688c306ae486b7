"""Texts with facts planted in them: each question has one answer, and the text gives it."""

import hashlib
import re
from collections import Counter
from itertools import pairwise

import pytest

from labsupport.training import words
from labsupport.training.facts import Dice, _words, dialogue, records

MAKERS = [records, dialogue]
of_each_kind = pytest.mark.parametrize("make", MAKERS)
in_each_way = pytest.mark.parametrize("ask", ["apart", "throughout"])

STATEMENTS = {
    "locker": r"locker (?P<key>[A-Z]\w\w): (?P<value>\d+)",
    "code": r"the code of the (?P<key>\w+ \w+) is (?P<value>\d\d)",
    "place": r"the (?P<key>\w+ \w+) is in room (?P<value>[A-Z])",
    "who": r"I know of the (?P<key>\w+ \w+) from (?P<value>\w+)",
    "when": r"we heard of the (?P<key>\w+ \w+) at (?P<value>\d\d:\d\d)",
}


def statements(text):
    """(kind, key, value, time, speaker) of each line that states a fact; not of questions."""
    found = []
    for line in text.splitlines():
        turn = re.fullmatch(r"(?:(\d\d:\d\d) (\w+): )?(.*)\.", line)
        for kind, pattern in STATEMENTS.items():
            if turn and (fact := re.fullmatch(pattern, turn[3])):
                found.append((kind, fact["key"], fact["value"], turn[1], turn[2]))
    return found


@of_each_kind
@in_each_way
@pytest.mark.parametrize("seed", range(3))
def test_the_text_alone_gives_one_answer_to_each_question_in_its_words(make, ask, seed):
    document = make(3000, seed=seed, ask=ask)
    known = {}
    for kind, key, value, _, speaker in statements(document.text):
        known.setdefault((kind, key, speaker), set()).add(value)
    assert len(known) == len(document.questions) == 30
    assert len({(kind, key) for kind, key, _ in known}) == 30  # nor would another speaker
    for question in document.questions:
        start, end = question.evidence
        assert question.prompt + question.answer == "? " + document.text[start:end]
        assert document.text[end] == "."
        said = re.fullmatch(r"\? (?:(\w+): )?(.*)", question.prompt + question.answer)
        key = re.fullmatch(STATEMENTS[question.kind], said[2])["key"]
        assert known[question.kind, key, said[1]] == {question.answer}
        assert not question.prompt.startswith(f"? {question.answer}:")


@of_each_kind
def test_the_length_is_hit_exactly_in_ascii_lines(make):
    for length in range(1500, 1600):
        text = make(length, seed=length, facts=5).text
        assert len(text) == length
        assert text.isascii()
        assert text.endswith("\n")
        assert max(map(len, text.splitlines())) < 130
    assert all(len(_words(Dice(0), n)) == n for n in range(1, 100))


@of_each_kind
def test_facts_are_spread_evenly_over_the_text(make):
    documents = [make(20_000, seed=seed) for seed in range(8)]
    places = sorted(q.evidence[0] / 20_000 for d in documents for q in d.questions)
    # Kolmogorov and Smirnov's distance from the uniform distribution, at 1%.
    distance = max(abs(place - i / len(places)) for i, place in enumerate(places))
    assert distance < 1.63 / len(places) ** 0.5


def test_filler_looks_like_no_fact():
    text = records(5000, seed=1, facts=10).text
    filler = [line for line in text.splitlines() if not line.startswith("locker")]
    assert len(filler) > 60
    assert not re.search(r"[A-Z0-9:?]", " ".join(filler))


@pytest.mark.parametrize(
    ("make", "length", "digest"),
    [(records, 600, "825f97325d0430ed"), (dialogue, 900, "4e8aff06fe552c6a")],
)
def test_a_seed_gives_the_same_text_on_every_machine(make, length, digest):
    text = make(length, seed=0).text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@of_each_kind
def test_an_answer_is_as_hard_to_guess_as_its_chance_says(make):
    questions = [q for seed in range(150) for q in make(2000, seed=seed).questions]
    sizes = {"locker": 100, "code": 100, "place": 12, "who": 3, "when": 720}
    for kind in {q.kind for q in questions}:
        of_kind = [q for q in questions if q.kind == kind]
        assert {q.chance for q in of_kind} == {1 / sizes[kind]}
        _, most = Counter(q.answer for q in of_kind).most_common(1)[0]
        # In a dialogue the four names of ten are drawn anew.
        expected = 1 / 10 if kind == "who" else 1 / sizes[kind]
        noise = 5 * (expected / len(of_kind)) ** 0.5 + 5 / len(of_kind)
        assert most / len(of_kind) <= expected + noise, kind
        if kind in ("locker", "code", "place"):
            assert len({q.answer for q in of_kind}) == sizes[kind]


@of_each_kind
@pytest.mark.parametrize("seed", range(3))
def test_what_the_text_asks_it_answers_after_the_fact_and_about_each_equally_often(make, seed):
    document = make(4000, seed=seed, facts=7, questions=24, ask="throughout")
    assert document.text.count("\n? ") == len(document.answers) == 24
    assert document.answers == sorted(document.answers)
    for question, (start, end) in zip(document.questions, document.answers, strict=True):
        assert document.text[start:end] == question.answer
        assert document.text[:start].endswith("\n" + question.prompt)
        assert question.evidence[1] < start - len(question.prompt)
    times = Counter(question.prompt for question in document.questions)
    assert sorted(times.values()) == [3, 3, 3, 3, 4, 4, 4]
    apart = make(3000, seed=seed)
    assert "\n? " not in apart.text
    assert apart.answers == []


@in_each_way
@pytest.mark.parametrize("seed", range(3))
def test_a_dialogue_goes_through_the_day_and_repeats_a_fact_as_it_was(seed, ask):
    text = dialogue(6000, seed=seed, facts=40, ask=ask).text
    talk = re.findall(r"^(\d\d:\d\d) (\w+): (.*)$", text, re.MULTILINE)
    times = [time for time, _, _ in talk]
    assert times == sorted(times)
    assert times[0] == "08:00"
    assert "19:00" <= times[-1] < "20:00"
    assert text.index("11:") < text.index("(Noon") < text.index("12:") < text.index("(Evening")
    replies = 0
    for (_, last, _), (_, speaker, said) in pairwise(talk):
        assert speaker != last
        if said.endswith(tuple(f"; {remark}." for remark in words.REMARKS)):
            assert any(said.startswith(reply.format(last=last)) for reply in words.REPLIES)
            replies += 1
    assert replies > 5
    first, repeats = {}, 0
    for kind, key, value, time, speaker in statements(text):
        if time is None:
            continue  # a question
        if kind in ("code", "place"):
            first[key] = time, speaker
        else:
            assert value == first[key][kind == "who"]  # so it came before
            assert speaker != first[key][1]
            repeats += 1
    assert repeats == 13


@of_each_kind
def test_long_texts_have_as_many_facts_as_there_are_keys(make):
    document = make(250_000, seed=0)
    assert len(document.questions) == {records: 2000, dialogue: 512}[make]


@of_each_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "0 or more, not -1"),
        ({"facts": 0}, "not 0"),
        ({"facts": 5000}, "as many as there are keys, not 5000"),
        ({"facts": 3, "questions": 4}, r"once, not 4.*throughout"),
        ({"ask": "never"}, "not 'never'"),
        ({"facts": 100}, "has no room.*longer text"),
        ({"facts": 5, "questions": 90, "ask": "throughout"}, "has no room"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(1000, **{"seed": 0} | options)
