"""Facts in real documents: where they stand, who finds them, and what the answers rest on."""

import re

import pandas as pd
import pytest
import torch

from labsupport.models import python_topics
from labsupport.training.tasks.document import (
    answer_by_window,
    latest_candidate,
    plant,
    score_answers,
    search_answer,
    sentences_of,
)
from labsupport.training.tasks.windows import Reading
from tests.models.conftest import smollm2  # noqa: F401  a fixture
from tests.models.tiny import tiny

TOPIC = python_topics()["specialnames"]


class Words:
    """A tokenizer of words and signs, each with the space before it."""

    def __init__(self):
        self.known = {}

    def __call__(self, text, **_):
        spans = [m.span() for m in re.finditer(r"\s*(?:\w+|[^\w\s])|\s+\Z", text)]
        ids = [self.known.setdefault(text[a:b].strip(), len(self.known)) for a, b in spans]
        return {"input_ids": ids, "offset_mapping": spans}

    def encode(self, text, **_):
        return self(text)["input_ids"]


@pytest.fixture
def tokenizer():
    return Words()


def test_facts_stand_where_they_are_said_to_and_nowhere_else(tokenizer):
    document = plant(tokenizer, TOPIC, length=1500, facts=8, seed=3)
    assert len(document.facts) == len(set(document.candidates)) == 8
    for fact in document.facts:
        assert document.text[fact.start : fact.end] == f"{fact.question} {fact.word}."
        for word in (fact.word, fact.place, fact.relation):
            assert document.text.count(word) == 1
    assert document == plant(tokenizer, TOPIC, length=1500, facts=8, seed=3)
    assert document != plant(tokenizer, TOPIC, length=1500, facts=8, seed=4)


@pytest.mark.parametrize("length", [800, 1500, 4000])
def test_the_document_is_real_apart_from_the_facts_and_as_long_as_asked_for(tokenizer, length):
    document = plant(tokenizer, TOPIC, length=length, facts=6)
    assert 0.85 * length < len(tokenizer.encode(document.text)) <= length
    real = document.text
    for fact in reversed(document.facts):
        real = real[: fact.start] + real[fact.end + 2 :]
    assert TOPIC.startswith(real.rstrip("\n"))
    places = [fact.start / len(document.text) for fact in document.facts]
    assert places == sorted(places)
    assert places[0] < 0.35 < 0.65 < places[-1]


def test_too_many_facts_for_the_words_or_the_paragraphs_are_refused(tokenizer):
    with pytest.raises(ValueError, match="facts is 2 to"):
        plant(tokenizer, TOPIC, facts=99)
    with pytest.raises(ValueError, match="too few for 8 facts"):
        plant(tokenizer, "one\n\ntwo\n\nthree", facts=8)


def test_sentences_end_at_signs_and_gaps_and_cover_everything_but_space():
    text = "One. Two is 3.5 long?\n\n* three\n\nFour\ngoes on: five"
    parts = [text[a:b] for a, b in sentences_of(text)]
    assert parts == ["One.", "Two is 3.5 long?", "* three", "Four\ngoes on:", "five"]
    parts = "".join(TOPIC[a:b] for a, b in sentences_of(TOPIC))
    assert "".join(parts.split()) == "".join(TOPIC.split())


def test_a_search_answers_each_question_whose_fact_it_sees_and_recency_one(tokenizer):
    document = plant(tokenizer, TOPIC, length=1500, facts=8)
    found = [search_answer(f.question, document.text, document.candidates) for f in document.facts]
    assert found == document.candidates
    assert latest_candidate(document.text, document.candidates) == document.candidates[-1]
    assert latest_candidate("nothing", document.candidates) is None
    assert search_answer("The mascot of the mill is", "", ["fox"]) is None


@pytest.fixture
def asked(tokenizer):
    document = plant(tokenizer, TOPIC, length=400, facts=4)
    for fact in document.facts:
        tokenizer.encode(fact.question)
    model = tiny("llama", vocab_size=len(tokenizer.known))
    return model, document


def test_each_window_reads_the_document_s_last_tokens(asked, tokenizer):
    model, document = asked
    table = answer_by_window(model, tokenizer, document, (100, 200, 9999), evidence=0)
    total = len(tokenizer.encode(document.text))
    assert list(table.read) == [100] * 4 + [200] * 4 + [total] * 4
    assert (table.visible == (table.depth <= table.read)).all()
    assert (table.search == table.visible).all()
    assert 0 < table.visible[:4].sum() < table.visible[4:8].sum() < table.visible[8:].sum() == 4
    assert list(table.recent) == [False, False, False, True] * 3
    assert set(table.chance) == {1 / 4}
    assert table.lost.isna().all()


def test_the_answer_is_the_likeliest_candidate_behind_text_and_question(asked, tokenizer):
    model, document = asked
    table = answer_by_window(model, tokenizer, document, (150,), evidence=0)
    ids = torch.tensor([tokenizer.encode(document.text)[-150:]])
    for row, fact in zip(table.itertuples(), document.facts, strict=True):
        question = torch.tensor([tokenizer.encode(fact.question)])
        with torch.no_grad():
            logits = model(torch.cat([ids, question], 1)).logits[0, -1]
        scores = {word: float(logits[tokenizer.known[word]]) for word in document.candidates}
        assert row.answer == max(scores, key=scores.__getitem__)
        assert row.right == (row.answer == fact.word)
        assert row.greedy == (int(logits.argmax()) == tokenizer.known[fact.word])


def test_the_evidence_is_the_sentence_without_which_the_answer_loses_most(asked, tokenizer):
    model, document = asked
    every = len(sentences_of(document.text))
    table = answer_by_window(model, tokenizer, document, (9999,), evidence=every)
    encoded = tokenizer(document.text)
    reading = Reading(model, torch.tensor([encoded["input_ids"]]))
    firsts = [tokenizer.known[word] for word in document.candidates]
    for row, fact in zip(table.itertuples(), document.facts, strict=True):
        left = {}
        for a, b in sentences_of(document.text):
            inside = [i for i, (x, y) in enumerate(encoded["offset_mapping"]) if y > a and x < b]
            logits = reading.ask(
                torch.tensor([tokenizer.encode(fact.question)]),
                without=(inside[0], inside[-1] + 1),
            )[-1]
            likely = float(logits.log_softmax(-1)[tokenizer.known[row.answer]])
            left[likely] = (a, b, document.candidates[int(logits[firsts].argmax())])
        a, b, instead = left[min(left)]
        assert row.evidence == " ".join(document.text[a:b].split())
        assert row.evidence_right == (a <= fact.start < b)
        assert row.lost == (instead != row.answer)


def test_a_real_model_finds_facts_and_its_answers_rest_on_them(smollm2):  # noqa: F811
    document = plant(smollm2.tokenizer, TOPIC, length=300, facts=3)
    table = answer_by_window(smollm2.model, smollm2.tokenizer, document, (300,), evidence=2)
    right = table[table.right]
    assert len(right) >= 2
    assert right.evidence_right.all()
    assert right.lost.all()


def test_candidates_that_begin_alike_are_refused(asked):
    model, document = asked

    class Letters(Words):
        def encode(self, text, **_):
            return [0 if text.strip() in document.candidates else 1]

    with pytest.raises(ValueError, match="begin with the same token"):
        answer_by_window(model, Letters(), document, (50,))


def test_scores_are_shares_by_window():
    table = pd.DataFrame(
        {
            "window": [8] * 4,
            "chance": [0.25] * 4,
            "visible": [False, True, True, True],
            "right": [True, True, True, False],
            "greedy": [False, True, False, False],
            "recent": [False, False, False, True],
            "search": [False, True, True, True],
            "evidence_right": [False, True, False, True],
            "lost": [False, True, True, True],
        }
    )
    (row,) = score_answers(table).to_dict("records")
    assert row == {
        "window": 8,
        "questions": 4,
        "visible": 0.75,
        "right": 0.75,
        "greedy": 0.25,
        "recent": 0.25,
        "search": 0.75,
        "chance": 0.25,
        "right_visible": pytest.approx(2 / 3),
        "evidence_right": 0.5,  # of the second and third
        "lost": 1.0,
    }
