"""Tasks of a longer context: who finds what, and what the scores mean."""

import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks.long_texts.calls import call_sites, predict_calls
from benchmarks.long_texts.documents import (
    Reading,
    answer_by_window,
    latest_candidate,
    plant,
    search_answer,
)
from labsupport.models import python_topics, set_attention, source_text
from tests.models.tiny import tiny, tokens

TOPIC = python_topics()["specialnames"]


# --- questions about a document -------------------------------------------------------------------


def whole(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0]


def test_a_text_is_read_once_for_all_questions():
    llama = tiny("llama")
    set_attention(llama, "flash")
    text, first, second = tokens(1, 12), tokens(1, 3, seed=1), tokens(1, 5, seed=2)
    reading = Reading(llama, text)
    for question in (first, second, first):
        expected = whole(llama, torch.cat([text, question], 1))[-1]
        torch.testing.assert_close(reading.ask(question), expected)


class Tokens:
    """A tokenizer by a regular expression, which leaves no character out."""

    def __init__(self, pattern=r"(?s)."):
        self.pattern, self.known = pattern, {}

    def __call__(self, text, **_):
        spans = [match.span() for match in re.finditer(self.pattern, text)]
        parts = (text[a:b].strip() or text[a:b] for a, b in spans)
        ids = [self.known.setdefault(part, len(self.known)) for part in parts]
        return {"input_ids": ids, "offset_mapping": spans}

    def encode(self, text, **_):
        return self(text)["input_ids"]

    def decode(self, ids):
        names = list(self.known)
        return "".join(names[int(i)] for i in ids)


@pytest.fixture
def words():
    """Words and signs, each with the space before it."""
    return Tokens(r"\s*(?:\w+|[^\w\s])|\s+\Z")


def test_facts_stand_where_they_say_in_a_document_as_long_as_asked_for(words):
    document, again, other = (plant(words, TOPIC, length=800, facts=6, seed=n) for n in (3, 3, 4))
    assert document == again != other
    assert 680 < len(words.encode(document.text)) <= 800
    candidates, real = [fact.answer for fact in document.questions], document.text
    assert len(set(candidates)) == 6
    for fact in reversed(document.questions):
        start, end = fact.evidence
        assert document.text[start : end + 1] == f"{fact.prompt} {fact.answer}."
        for word in (fact.answer, *re.findall(r"The (\w+) of the (\w+) is", fact.prompt)[0]):
            assert document.text.count(word) == 1
        real = real[:start] + real[end + 3 :]
    assert TOPIC.startswith(real.rstrip("\n"))
    places = [fact.evidence[0] / len(document.text) for fact in document.questions]
    assert places == sorted(places)
    assert places[0] < 0.35 < 0.65 < places[-1]
    found = [search_answer(f.prompt, document.text, candidates) for f in document.questions]
    assert found == candidates
    assert latest_candidate(document.text, candidates) == candidates[-1]
    with pytest.raises(ValueError, match="too few for 8 facts"):
        plant(words, "a\n\nb", facts=8)


def test_answers_are_the_likeliest_candidates(words):
    document = plant(words, TOPIC, length=200, facts=2)
    for fact in document.questions:
        words.encode(fact.prompt)
    model = tiny("llama", vocab_size=len(words.known))
    table = answer_by_window(model, words, document, (80, 9999))
    assert (table.search == table.visible).all()
    assert 0 < table.visible[:2].sum() < table.visible[2:].sum() == 2
    assert list(table.recent) == [False, True] * 2
    assert set(table.chance) == {1 / 2}
    ids = torch.tensor([words.encode(document.text)])
    answers = [fact.answer for fact in document.questions]
    firsts = [words.known[answer] for answer in answers]
    for row, fact in zip(table[:2].itertuples(), document.questions, strict=True):
        question = torch.tensor([words.encode(fact.prompt)])
        best = whole(model, torch.cat([ids[:, -80:], question], 1))[-1][firsts].argmax()
        assert (row.answer, row.right) == (answers[best], answers[best] == fact.answer)


# --- calls in a file ------------------------------------------------------------------------------

SOURCE = """\
def alpha(x):
    return x

def beta(y):
    "é"; return alpha(y)

class C:
    def gamma(self):
        return self.gamma(alpha(1)) + len("alpha(2)")

x = '\x0c\u2028'; print(beta(3), C().gamma(), alpha)
"""


def test_sites_are_calls_of_functions_and_methods_that_the_file_defines():
    sites = call_sites(SOURCE)
    assert [site.name for site in sites] == ["alpha", "gamma", "alpha", "beta", "gamma"]
    assert all(SOURCE[site.start : site.end] == site.name for site in sites)
    assert all(SOURCE[site.end] == "(" for site in sites)


class Knows:
    """A model that knows the file by heart, apart from some places; there it says another token."""

    def __init__(self, ids, instead=()):
        self.ids, self.instead, self.device = ids, dict(instead), torch.device("cpu")

    def __call__(self, ids, *, use_cache, logits_to_keep):
        block = ids[0].tolist()
        begin = next(i for i in range(len(self.ids)) if self.ids[i : i + len(block)] == block)
        logits = torch.zeros(1, len(logits_to_keep), max(self.ids) + 1)
        for row, at in enumerate(logits_to_keep.tolist()):
            following = begin + at + 1
            right = self.ids[following] if following < len(self.ids) else 0
            logits[0, row, self.instead.get(following, right)] = 1.0
        return SimpleNamespace(logits=logits)


def test_a_model_that_knows_the_file_is_right_at_each_site_once():
    source, tokenizer, window = source_text("textwrap"), Tokens("(?s).{1,3}"), 40
    model = Knows(tokenizer(source)["input_ids"])
    table = predict_calls(model, tokenizer, source, window)
    assert list(table.start) == [site.start for site in call_sites(source)]
    # A token of several characters may hold the name's end and "(" or more: still the file's own.
    assert table.model.all()
    assert (table.seen < window).all()
    assert (table.seen[table.start // 3 >= window] >= window // 2).all()
