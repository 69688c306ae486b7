"""Tasks of a longer context: who finds what, and what the scores mean."""

import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from labsupport.models import python_topics, set_attention, source_text
from labsupport.training.tasks.code import baselines, call_sites, predict_calls, score_calls
from labsupport.training.tasks.document import (
    answer_by_window,
    latest_candidate,
    plant,
    score_answers,
    search_answer,
    sentences_of,
)
from labsupport.training.tasks.summary import (
    Chapter,
    chapter,
    content_words,
    judge_summary,
    lead,
    summarise,
)
from labsupport.training.tasks.windows import Reading, nll_by_window, with_repeat
from tests.models.conftest import smollm2, stories15m, stories_folder  # noqa: F401  fixtures
from tests.models.tiny import tiny, tokens

TOPIC = python_topics()["specialnames"]


# --- a text that is read once ---------------------------------------------------------------------


@pytest.fixture(params=["standard", "flash"])
def llama(request):
    model = tiny("llama")
    set_attention(model, request.param)
    return model


def whole(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits[0]


def test_continuations_get_the_logits_of_the_whole_each_time_anew(llama):
    text, first, second = tokens(1, 20), tokens(1, 5, seed=1), tokens(1, 3, seed=2)
    reading = Reading(llama, text)
    for question in (first, second, first):
        expected = whole(llama, torch.cat([text, question], 1))
        n = question.shape[1]
        torch.testing.assert_close(reading.ask(question, keep=n), expected[-n:])
    torch.testing.assert_close(reading.last, whole(llama, text)[-1])
    together = torch.cat([text, first], 1)
    torch.testing.assert_close(reading.extend(first, keep=4), whole(llama, together)[-4:])
    assert reading.length == 25
    expected = whole(llama, torch.cat([together, second], 1))[-1:]
    torch.testing.assert_close(reading.ask(second), expected)
    with pytest.raises(ValueError, match="training mode"):
        Reading(llama.train(), text)


def test_tokens_left_out_cannot_be_seen_by_the_question_and_positions_stay(llama):
    # Against the whole text with a mask in which only the rows of the question miss tokens 4 to 6.
    text, question = tokens(1, 12), tokens(1, 3, seed=1)
    left_out = Reading(llama, text).ask(question, keep=3, without=(4, 7))
    ids = torch.cat([text, question], 1)
    allowed = torch.ones(15, 15, dtype=torch.bool).tril()
    allowed[12:, 4:7] = False
    llama.set_attn_implementation("eager")
    scores = torch.zeros(15, 15).masked_fill(~allowed, -torch.inf)[None, None]
    torch.testing.assert_close(left_out, whole(llama, ids, attention_mask=scores)[-3:])
    assert not torch.allclose(left_out, whole(llama, ids)[-3:])


def test_attention_is_the_last_row_of_the_model_s_own_weights(llama):
    text, question = tokens(1, 12), tokens(1, 3, seed=1)
    reading, chosen = Reading(llama, text), llama.config._attn_implementation
    weights = reading.attention(question)
    assert reading.attention(question[:, :1]).shape == weights.shape
    assert llama.config._attn_implementation == chosen
    torch.testing.assert_close(
        reading.ask(question), whole(llama, torch.cat([text, question], 1))[-1:]
    )
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        own = llama(torch.cat([text, question], 1), output_attentions=True).attentions
    torch.testing.assert_close(weights, torch.stack([layer[0, :, -1, :12] for layer in own]))


@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_a_window_is_what_is_seen_before_the_passage(chunk):
    model, ids = tiny("llama"), tokens(1, 40)

    def loss_of(start, stop, window):
        first = max(0, start - window)
        logits = whole(model, ids[:, first:stop])[start - first - 1 : -1]
        return F.cross_entropy(logits, ids[0, start:stop]).item()

    table = nll_by_window(model, ids, slice(25, 36), (1, 8, 25, 100), chunk=chunk)
    assert list(table.seen) == [1, 8, 25, 25]
    assert list(table.tokens) == [11] * 4
    expected = [loss_of(25, 36, window) for window in (1, 8, 25, 100)]
    assert list(table.nll) == pytest.approx(expected, rel=1e-5)
    assert len({round(value, 4) for value in expected}) == 3
    (nll,) = nll_by_window(model, ids, slice(35, None), (4,)).nll
    assert nll == pytest.approx(loss_of(35, 40, 4), rel=1e-5)


@pytest.mark.parametrize(
    ("target", "window"), [((0, 5), 4), ((5, 5), 4), ((5, 99), 4), ((5, 9), 0)]
)
def test_what_is_no_passage_or_no_window_is_refused(target, window):
    with pytest.raises(ValueError, match="is no passage of 20 tokens"):
        nll_by_window(tiny("llama"), tokens(1, 20), slice(*target), (4, window))


def test_a_passage_that_returns_is_copied_once_the_window_reaches_it(smollm2):  # noqa: F811
    passage = source_text("heapq")
    passage, text = passage[passage.index("def merge(") :], source_text("textwrap")
    tokenizer = smollm2.tokenizer
    repeat = with_repeat(tokenizer, text, passage, distance=120, length=48, lead=8)
    assert torch.equal(repeat.ids[:, repeat.first], repeat.ids[:, repeat.target])
    assert repeat.distance == 120
    assert repeat.ids.shape == (1, 8 + 120 + 48)
    assert (repeat.first.start, repeat.target.stop) == (8, 176)
    table = nll_by_window(smollm2.model, repeat.ids, repeat.target, (8, 72, 120))
    near, almost, reached = table.nll
    assert reached < 1.2 < 2 < almost < near + 0.3
    with pytest.raises(ValueError, match="distance=10 must be at least length=20"):
        with_repeat(tokenizer, text, "x" * 99, distance=10, length=20)
    with pytest.raises(ValueError, match="the text holds the passage already"):
        with_repeat(tokenizer, text, text[500:900], distance=60, length=20)


# --- questions about a document -------------------------------------------------------------------


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
def words():
    return Words()


@pytest.mark.parametrize("length", [800, 1500, 4000])
def test_facts_stand_where_they_say_in_a_document_as_long_as_asked_for(words, length):
    document = plant(words, TOPIC, length=length, facts=6, seed=3)
    assert 0.85 * length < len(words.encode(document.text)) <= length
    candidates = [fact.answer for fact in document.questions]
    assert len(set(candidates)) == 6
    real = document.text
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
    assert document == plant(words, TOPIC, length=length, facts=6, seed=3)
    assert document != plant(words, TOPIC, length=length, facts=6, seed=4)
    found = [search_answer(f.prompt, document.text, candidates) for f in document.questions]
    assert found == candidates
    assert latest_candidate(document.text, candidates) == candidates[-1]


def test_too_many_facts_for_the_words_or_the_paragraphs_are_refused(words):
    with pytest.raises(ValueError, match="facts is 2 to"):
        plant(words, TOPIC, facts=99)
    with pytest.raises(ValueError, match="too few for 8 facts"):
        plant(words, "one\n\ntwo\n\nthree", facts=8)


def test_sentences_end_at_signs_and_gaps_and_cover_everything_but_space():
    text = "One. Two is 3.5 long?\n\n* three\n\nFour\ngoes on: five"
    parts = [text[a:b] for a, b in sentences_of(text)]
    assert parts == ["One.", "Two is 3.5 long?", "* three", "Four\ngoes on:", "five"]
    parts = "".join(TOPIC[a:b] for a, b in sentences_of(TOPIC))
    assert "".join(parts.split()) == "".join(TOPIC.split())
    assert latest_candidate("nothing", ["fox"]) is None
    assert search_answer("The mascot of the mill is", "", ["fox"]) is None


@pytest.fixture
def asked(words):
    document = plant(words, TOPIC, length=400, facts=4)
    for fact in document.questions:
        words.encode(fact.prompt)
    return tiny("llama", vocab_size=len(words.known)), document


def test_the_answer_is_the_likeliest_candidate_after_the_last_tokens_and_question(asked, words):
    model, document = asked
    table = answer_by_window(model, words, document, (100, 200, 9999), evidence=0)
    total = len(words.encode(document.text))
    assert list(table.read) == [100] * 4 + [200] * 4 + [total] * 4
    assert (table.visible == (table.depth <= table.read)).all()
    assert (table.search == table.visible).all()
    assert 0 < table.visible[:4].sum() < table.visible[4:8].sum() < table.visible[8:].sum() == 4
    assert list(table.recent) == [False, False, False, True] * 3
    assert set(table.chance) == {1 / 4}
    assert table.lost.isna().all()
    ids = torch.tensor([words.encode(document.text)[-200:]])
    for row, fact in zip(table[4:8].itertuples(), document.questions, strict=True):
        question = torch.tensor([words.encode(fact.prompt)])
        logits = whole(model, torch.cat([ids, question], 1))[-1]
        scores = {q.answer: float(logits[words.known[q.answer]]) for q in document.questions}
        assert row.answer == max(scores, key=scores.__getitem__)
        assert row.right == (row.answer == fact.answer)
        assert row.greedy == (int(logits.argmax()) == words.known[fact.answer])


def test_the_evidence_is_the_sentence_without_which_the_answer_loses_most(asked, words):
    model, document = asked
    sentences = sentences_of(document.text)
    table = answer_by_window(model, words, document, (9999,), evidence=len(sentences))
    encoded = words(document.text)
    reading = Reading(model, torch.tensor([encoded["input_ids"]]))
    candidates = [fact.answer for fact in document.questions]
    firsts = [words.known[word] for word in candidates]
    for row, fact in zip(table.itertuples(), document.questions, strict=True):
        left = {}
        for a, b in sentences:
            inside = [i for i, (x, y) in enumerate(encoded["offset_mapping"]) if y > a and x < b]
            question = torch.tensor([words.encode(fact.prompt)])
            logits = reading.ask(question, without=(inside[0], inside[-1] + 1))[-1]
            likely = float(logits.log_softmax(-1)[words.known[row.answer]])
            left[likely] = (a, b, candidates[int(logits[firsts].argmax())])
        a, b, instead = left[min(left)]
        assert row.evidence == " ".join(document.text[a:b].split())
        assert row.evidence_right == (a <= fact.evidence[0] < b)
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
    alike = Words()
    alike.encode = lambda text, **_: [0]
    with pytest.raises(ValueError, match="begin with the same token"):
        answer_by_window(model, alike, document, (50,))


def test_scores_of_answers_are_shares_by_window():
    columns = {
        "visible": [0, 1, 1, 1],
        "right": [1, 1, 1, 0],
        "greedy": [0, 1, 0, 0],
        "recent": [0, 0, 0, 1],
        "search": [0, 1, 1, 1],
        "evidence_right": [0, 1, 0, 1],
        "lost": [0, 1, 1, 1],
    }
    table = pd.DataFrame(columns).astype(bool).assign(window=8, chance=0.25)
    (row,) = score_answers(table).to_dict("records")
    expected = {"window": 8, "questions": 4, "visible": 0.75, "right": 0.75, "greedy": 0.25}
    expected |= {"recent": 0.25, "search": 0.75, "chance": 0.25, "right_visible": 2 / 3}
    # Evidence: of the second and third.
    assert row == pytest.approx(expected | {"evidence_right": 0.5, "lost": 1.0})


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
    for module in ("configparser", "email.header"):
        source = source_text(module)
        assert len(call_sites(source)) > 5
        for site in call_sites(source):
            assert source[site.start : site.end] == site.name
            assert source[site.end :].lstrip()[0] in "()"


class Characters:
    """A tokenizer of so many characters a token."""

    def __init__(self, size=1):
        self.size, self.known = size, {}

    def __call__(self, text, **_):
        spans = [(i, min(i + self.size, len(text))) for i in range(0, len(text), self.size)]
        ids = [self.known.setdefault(text[a:b], len(self.known)) for a, b in spans]
        return {"input_ids": ids, "offset_mapping": spans}

    def decode(self, ids):
        names = {number: text for text, number in self.known.items()}
        return "".join(names[int(i)] for i in ids)


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


@pytest.mark.parametrize(("size", "window"), [(1, 40), (1, 4096), (2, 64), (3, 40)])
def test_a_model_that_knows_the_file_is_right_at_each_site_once(size, window):
    source, tokenizer = source_text("textwrap"), Characters(size)
    model = Knows(tokenizer(source)["input_ids"])
    table = predict_calls(model, tokenizer, source, window)
    assert list(table.start) == [site.start for site in call_sites(source)]
    # A token of several characters may hold the name's end and "(" or more: still the file's own.
    assert table.model.all()
    assert (table.seen < window).all()
    assert (table.seen[table.start // size >= window] >= window // 2).all()
    with pytest.raises(ValueError, match="must be even, and at least 4"):
        predict_calls(model, tokenizer, source, window + 1)


def test_a_wrong_letter_or_a_name_that_goes_on_is_wrong():
    source, tokenizer = "def ab(): pass\ndef abc(): pass\nab()\n", Characters()
    ids, call = tokenizer(source)["input_ids"], len("def ab(): pass\ndef abc(): pass\n")
    letter = {name: tokenizer.known[name] for name in "ac"}
    for place, instead, right in (
        (0, "c", False),
        (1, "a", False),
        (2, "c", False),
        (3, "a", True),
    ):
        model = Knows(ids, {call + place: letter[instead]})
        assert list(predict_calls(model, tokenizer, source, 64).model) == [right]


def test_reachable_is_that_the_name_stands_in_what_the_model_sees():
    source = "def far(): pass\n" + "x = 1\n" * 40 + "far()\nfar()\n"
    tokenizer = Characters()
    model = Knows(tokenizer(source)["input_ids"])
    table = predict_calls(model, tokenizer, source, 32)
    assert list(table.distance) == [source.index("far()\n") - 4, 6]
    assert list(table.reachable) == [False, True]
    assert list(table.latest) == [False, True]
    assert list(predict_calls(model, tokenizer, source, 4096).reachable) == [True, True]


def test_baselines_look_at_the_visible_calls_only():
    source = "def a(): pass\ndef b(): pass\na()\na()\nx = b()\na()\nx = b()\n"
    sites = call_sites(source)
    last = sites[-1]
    all_seen = baselines(source, last, sites[:-1], 0)
    assert all_seen == {"frequent": False, "latest": False, "search": True}
    one_seen = baselines(source, last, sites[2:3], sites[2].start - 4)
    assert one_seen == {"frequent": True, "latest": True, "search": True}
    assert not any(baselines(source, last, [], last.start).values())


def test_scores_of_calls_are_shares_by_window_and_kind_of_site():
    columns = {"distance": [0, 3, 3, 90], "reachable": [False, True, True, False]}
    table = pd.DataFrame(columns | {"model": [False, True, False, False]})
    table = table.assign(window=8, frequent=True, latest=False, search=False)
    scores = score_calls(table).set_index("sites")
    assert list(scores.index) == ["all", "in the window", "further back", "new"]
    assert list(scores["count"]) == [4, 2, 1, 1]
    assert list(scores["model"]) == [0.25, 0.5, 0.0, 0.0]
    assert list(scores["frequent"]) == [1.0] * 4


# --- summaries ------------------------------------------------------------------------------------

DOCUMENT = Chapter(
    "The fox sleeps under warm stones. Every winter it hides seven apples.\nNobody\nfinds them.",
    ("Foxes in winter", "Hidden apples"),
)


def test_headings_are_taken_out_of_a_chapter():
    found = chapter(python_topics()["async"])
    assert "Coroutine function definition" in found.headings
    assert not any(f"\n{heading}\n" in found.text for heading in found.headings)
    assert "====" not in found.text
    assert "****" not in found.text
    assert len(found.text) > 2000
    with pytest.raises(ValueError, match="no underlined headings"):
        chapter("A text.\n\nWithout any.")


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        # winter and apples; foxes and hidden are missing. Line breaks do not count.
        ("Every winter it\nhides seven apples. Nobody finds them.", (9, 1.0, 1.0, 2 / 4)),
        ("Wolves hate winter. Nobody finds them.", (6, 3 / 5, 0.5, 1 / 4)),  # wolves and hate
        ("", (0, 0.0, 0.0, 0.0)),
    ],
)
def test_what_is_counted_of_a_summary(summary, expected):
    assert tuple(judge_summary(summary, DOCUMENT).values()) == pytest.approx(expected)
    words = content_words("The Fox, which they SAW, hides _apples_ in 2024 with them")
    assert words == {"hides", "apples"}


def test_the_lead_is_whole_sentences_as_few_as_have_that_many_words():
    assert lead(DOCUMENT.text, 1) == lead(DOCUMENT.text, 6) == "The fox sleeps under warm stones."
    assert lead(DOCUMENT.text, 7).endswith("apples.")
    assert lead(DOCUMENT.text, 999) == DOCUMENT.text


def test_a_model_without_a_chat_template_is_refused(stories15m):  # noqa: F811
    with pytest.raises(ValueError, match="chat template"):
        summarise(stories15m.model, stories15m.tokenizer, DOCUMENT)
