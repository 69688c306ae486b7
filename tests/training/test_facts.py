"""Texts with facts planted in them: each question has one answer, and the text gives it."""

import hashlib
import re
from collections import Counter
from itertools import pairwise

import pytest

from labsupport.training.documents import words
from labsupport.training.documents.dialogue import dialogue
from labsupport.training.documents.facts import records
from labsupport.training.documents.planting import Dice, words_of

MAKERS = [records, dialogue]
WAYS = ["apart", "throughout", "at_end"]
of_each_kind = pytest.mark.parametrize("make", MAKERS)
in_each_way = pytest.mark.parametrize("ask", WAYS)

STATEMENTS = {
    "locker": r"locker (?P<key>[A-Z]\w\w): (?P<value>\d+)",
    "code": r"the code of the (?P<key>\w+ \w+) is (?P<value>\d\d)",
    "place": r"the (?P<key>\w+ \w+) is in room (?P<value>[A-Z])",
    "who": r"I know of the (?P<key>\w+ \w+) from (?P<value>\w+)",
    "when": r"we heard of the (?P<key>\w+ \w+) at (?P<value>\d\d:\d\d)",
}


def statements(text):
    """(kind, key, value, time, speaker) of each line that states a fact; what questions say not."""
    found = []
    for line in text.splitlines():
        turn = re.fullmatch(r"(?:(\d\d:\d\d) (\w+): )?(.*)\.", line)
        for kind, pattern in STATEMENTS.items():
            if turn and (fact := re.fullmatch(pattern, turn[3])):
                found.append((kind, fact["key"], fact["value"], turn[1], turn[2]))
    return found


def key_of(question):
    said = re.sub(r"^\? (\w+: )?(?=[a-zI])", "", question.prompt + question.answer)
    return re.fullmatch(STATEMENTS[question.kind], said)["key"]


def turns(text):
    return re.findall(r"^(\d\d:\d\d) (\w+): (.*)$", text, re.MULTILINE)


# --- what a question promises ---------------------------------------------------------------------


@of_each_kind
@in_each_way
@pytest.mark.parametrize("seed", range(8))
def test_a_question_ends_in_the_words_that_precede_its_answer_in_the_evidence(make, ask, seed):
    document = make(3000, seed=seed, ask=ask)
    assert len(document.questions) == 30
    for question in document.questions:
        start, end = question.evidence
        assert question.prompt + question.answer == "? " + document.text[start:end]
        assert document.text[end] == "."


@of_each_kind
@in_each_way
@pytest.mark.parametrize("seed", range(8))
def test_the_text_alone_gives_one_answer_to_each_question(make, ask, seed):
    document = make(3000, seed=seed, ask=ask)
    known = {}
    for kind, key, value, _, speaker in statements(document.text):
        known.setdefault((kind, key, speaker), set()).add(value)
    assert len(known) == 30
    for question in document.questions:
        said = re.fullmatch(r"\? (?:(\w+): )?(.*)", question.prompt + question.answer)
        key = re.fullmatch(STATEMENTS[question.kind], said[2])["key"]
        assert known[question.kind, key, said[1]] == {question.answer}
    # Nor would another speaker give another one.
    assert len({(kind, key) for kind, key, _ in known}) == len(known)


@of_each_kind
def test_the_length_is_hit_exactly_whatever_is_left_to_fill(make):
    for length in range(1500, 1700):
        assert len(make(length, seed=length, facts=5).text) == length
    assert all(len(words_of(Dice(0), n)) == n for n in range(1, 200))


@of_each_kind
@in_each_way
def test_the_text_is_ascii_and_ends_a_line(make, ask):
    text = make(2000, seed=5, ask=ask).text
    assert text.isascii()
    assert text.endswith("\n")
    assert max(map(len, text.splitlines())) < 130


@of_each_kind
@pytest.mark.parametrize("ask", ["apart", "at_end"])
def test_facts_are_spread_evenly_over_the_text(make, ask):
    places = []
    for seed in range(15):
        document = make(20_000, seed=seed, ask=ask)
        size = document.answers[0][0] - 10 if ask == "at_end" else len(document.text)
        places += [question.evidence[0] / size for question in document.questions]
    places.sort()
    # Kolmogorov and Smirnov's distance from the uniform distribution, at 1%.
    distance = max(abs(place - i / len(places)) for i, place in enumerate(places))
    assert distance < 1.63 / len(places) ** 0.5


def test_filler_looks_like_no_fact():
    text = records(5000, seed=1, facts=10).text
    filler = [line for line in text.splitlines() if not line.startswith("locker")]
    assert len(filler) > 60
    assert not re.search(r"[A-Z0-9:?]", " ".join(filler))


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "length", "digest"),
    [(records, 600, "825f97325d0430ed"), (dialogue, 900, "4e8aff06fe552c6a")],
)
def test_a_seed_gives_the_same_text_on_every_machine(make, length, digest):
    text = make(length, seed=0).text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@of_each_kind
def test_another_seed_gives_other_facts(make):
    facts = [{q.prompt + q.answer for q in make(2000, seed=s).questions} for s in range(20)]
    shared = [len(a & b) for i, a in enumerate(facts) for b in facts[:i]]
    assert max(shared) <= 2
    assert make(2000, seed=3) == make(2000, seed=3)


@of_each_kind
def test_an_answer_cannot_be_guessed_from_its_question(make):
    questions = [q for seed in range(300) for q in make(2000, seed=seed).questions]
    for kind in {q.kind for q in questions}:
        of_kind = [q for q in questions if q.kind == kind]
        chance, n = of_kind[0].chance, len(of_kind)
        noise = 4 * (chance * (1 - chance) / n) ** 0.5
        # Neither one answer for all of them, nor the one that went with the key, or its end,
        # elsewhere.
        for clue in (lambda q: "", key_of, lambda q: key_of(q)[-1]):
            learned, asked = of_kind[::2], of_kind[1::2]
            seen: dict = {}
            for q in learned:
                seen.setdefault(clue(q), Counter())[q.answer] += 1
            hits = [clue(q) in seen and seen[clue(q)].most_common(1)[0][0] for q in asked]
            right = sum(hit == q.answer for hit, q in zip(hits, asked, strict=True)) / len(asked)
            assert right <= chance + 1.5 * noise, (kind, right)


@of_each_kind
def test_the_chance_is_one_in_the_number_of_possible_answers(make):
    questions = [q for seed in range(400) for q in make(2000, seed=seed).questions]
    for kind, size in {"locker": 100, "code": 100, "place": 12}.items():
        answers = {q.answer for q in questions if q.kind == kind}
        assert not answers or len(answers) == size
        assert all(q.chance == pytest.approx(1 / size) for q in questions if q.kind == kind)


# --- questions in the text ------------------------------------------------------------------------


@of_each_kind
@pytest.mark.parametrize("ask", ["throughout", "at_end"])
@pytest.mark.parametrize("seed", range(5))
def test_what_the_text_asks_it_answers_after_the_fact(make, ask, seed):
    document = make(3000, seed=seed, facts=12, questions=12, ask=ask)
    assert len(document.answers) == 12
    for question, (start, end) in zip(document.questions, document.answers, strict=True):
        assert document.text[start:end] == question.answer
        assert document.text[:start].endswith("\n" + question.prompt)
        assert question.evidence[1] < start - len(question.prompt)
    assert document.text.count("\n? ") == 12
    assert document.answers == sorted(document.answers)


@of_each_kind
def test_asked_at_the_end_no_fact_comes_after_a_question(make):
    document = make(3000, seed=0, ask="at_end")
    first = document.answers[0][0]
    assert all(question.evidence[1] < first for question in document.questions)


@of_each_kind
def test_asked_apart_the_text_holds_no_question(make):
    document = make(3000, seed=0)
    assert "\n? " not in document.text
    assert document.answers == []


@of_each_kind
def test_asked_throughout_each_fact_is_asked_about_equally_often(make):
    document = make(4000, seed=0, facts=7, questions=24, ask="throughout")
    times = Counter(question.prompt for question in document.questions)
    assert sorted(times.values()) == [3, 3, 3, 3, 4, 4, 4]


def test_a_locker_s_number_has_as_many_digits_as_wanted():
    for digits in (1, 3):
        for question in records(1000, seed=0, digits=digits, ask="at_end").questions:
            assert re.fullmatch(rf"\d{{{digits}}}", question.answer)
            assert question.chance == 10.0**-digits


# --- dialogues are coherent -----------------------------------------------------------------------


@in_each_way
@pytest.mark.parametrize("seed", range(8))
def test_who_repeats_a_fact_repeats_it_as_it_was(seed, ask):
    said, repeats = {}, 0
    for kind, key, value, time, speaker in statements(dialogue(4000, seed=seed, ask=ask).text):
        if time is None:
            continue  # a question
        if kind in ("code", "place"):
            assert key not in said
            said[key] = time, speaker
        else:
            assert value == said[key][kind == "who"]  # so it came before
            assert speaker != said[key][1]
            repeats += 1
    assert repeats == 13


@in_each_way
@pytest.mark.parametrize("seed", range(5))
def test_a_dialogue_goes_through_the_day_and_each_turn_answers_the_last(seed, ask):
    text = dialogue(6000, seed=seed, facts=20, ask=ask).text
    talk = turns(text)
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
    assert replies > 20


def test_kinds_of_facts_can_be_left_out():
    document = dialogue(3000, seed=0, kinds=("place",))
    assert {question.kind for question in document.questions} == {"place"}
    kinds = {question.kind for question in dialogue(3000, seed=0).questions}
    assert kinds == {"code", "place", "who", "when"}


def test_more_speakers_make_it_harder_to_guess_who():
    for speakers in (3, 10):
        document = dialogue(6000, seed=0, speakers=speakers)
        assert len({speaker for _, speaker, _ in turns(document.text)}) == speakers
        chances = {q.chance for q in document.questions if q.kind == "who"}
        assert chances == {1 / (speakers - 1)}


def test_who_said_it_is_never_the_one_who_asks():
    for seed in range(20):
        for question in dialogue(2000, seed=seed).questions:
            assert not question.prompt.startswith(f"? {question.answer}:")


# --- size and refusals ----------------------------------------------------------------------------


@of_each_kind
def test_long_texts_are_made_with_as_many_facts_as_there_are_keys(make):
    document = make(300_000, seed=0)
    assert len(document.text) == 300_000
    assert len(document.questions) == {records: 2000, dialogue: 512}[make]


@of_each_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "0 or more, not -1"),
        ({"facts": 0}, "not 0"),
        ({"facts": 5000}, "as many as there are keys, not 5000"),
        ({"facts": 3, "questions": 4}, r"once, not 4.*throughout"),
        ({"facts": 3, "questions": 4, "ask": "at_end"}, "throughout"),
        ({"ask": "never"}, "not 'never'"),
        ({"facts": 100}, "has no room.*longer text"),
        ({"facts": 5, "questions": 90, "ask": "throughout"}, "has no room"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(1000, **{"seed": 0} | options)


@pytest.mark.parametrize(
    "options",
    [{"speakers": 2}, {"speakers": 11}, {"kinds": ("who",)}, {"kinds": ("code", "colour")}],
)
def test_a_dialogue_that_cannot_be_held_is_refused(options):
    with pytest.raises(ValueError, match="not"):
        dialogue(1000, seed=0, **options)


def test_a_number_without_digits_is_refused():
    with pytest.raises(ValueError, match="1 or more, not 0"):
        records(500, seed=0, digits=0)
