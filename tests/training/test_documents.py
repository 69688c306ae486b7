"""Real documents, and the way from text to tokens and back."""

import doctest
import importlib
import pkgutil
import platform
import random
import sys

import pytest

from labsupport.training import documents
from labsupport.training.documents.real import (
    MODULES,
    Document,
    documents_of,
    help_documents,
    source_documents,
)
from labsupport.training.documents.tokens import (
    BytePairTokenizer,
    ByteTokenizer,
    Encoded,
    encode,
    gpt2_tokenizer,
    token_spans,
)

AWKWARD = "Zürich 🦙, 日本語:\n\n\t  x\u0301 \u200d👩\x00 3.14 don't   <|endoftext|>\r\n"


@pytest.fixture(scope="session")
def from_transformers():
    from labsupport.models.sources.build import fetch
    from labsupport.models.sources.load import load_tokenizer

    return load_tokenizer(fetch(["gpt2"])[0])


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    return BytePairTokenizer(request.getfixturevalue("from_transformers"))


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(documents.__path__)] + [""])
def test_the_examples_are_right(name):
    module = importlib.import_module(f"labsupport.training.documents.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0


# --- real texts -----------------------------------------------------------------------------------


def test_a_real_document_says_of_which_python_it_is():
    for document in [*help_documents(), *source_documents(["argparse"])]:
        assert document.name.endswith(f" {platform.python_version()}")
        assert document.text.strip()


def test_sources_are_read_and_not_imported():
    sys.modules.pop("antigravity", None)
    (document,) = source_documents(["antigravity"])
    assert "webbrowser" in document.text
    assert "antigravity" not in sys.modules
    assert [d.name.split("'")[0] for d in source_documents()] == list(MODULES)
    with pytest.raises(ValueError, match="no_such"):
        source_documents(["argparse", "no_such"])


@pytest.mark.parametrize("at_least", [2048, 4096, 8192])
def test_documents_are_found_by_their_number_of_tokens(tokenizer, at_least):
    found = documents_of(tokenizer, at_least)
    lengths = [len(tokenizer.encode(document.text)) for document in found]
    assert len(found) >= 5
    assert min(lengths) >= at_least
    assert lengths == sorted(lengths)


def test_no_document_that_is_long_enough_is_missed(tokenizer):
    some = [Document(str(n), "word, " * n) for n in range(1, 60)]
    long = {d.name for d in some if len(tokenizer.encode(d.text)) >= 40}
    assert 0 < len(long) < len(some)
    assert {document.name for document in documents_of(tokenizer, 40, some)} == long


def test_where_no_document_is_long_enough_the_longest_is_named():
    with pytest.raises(ValueError, match=r"no document has 1,000 tokens.*fewer than 6.*records"):
        documents_of(ByteTokenizer(), 1000, [Document("a", "five!"), Document("b", "one")])


# --- tokens ---------------------------------------------------------------------------------------


def test_tokens_give_the_text_back(tokenizer):
    for text in ("", "a", AWKWARD, source_documents(["json"])[0].text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.pieces(ids)) == text.encode()
        assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_no_text_becomes_the_end_token_and_the_end_token_no_text(tokenizer):
    assert tokenizer.end_token not in tokenizer.encode(AWKWARD)
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_token]) == "a"


def test_half_a_character_becomes_a_replacement(tokenizer):
    ids = tokenizer.encode("🦙")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:-1]) == "\N{REPLACEMENT CHARACTER}"


def test_every_token_of_gpt2_has_the_bytes_that_transformers_gives_it(from_transformers):
    ours = BytePairTokenizer(from_transformers)
    assert (ours.vocab_size, ours.end_token) == (50_257, 50_256)
    ids = range(50_256)
    pieces = ours.pieces(ids)
    assert len(set(pieces)) == 50_256
    theirs = from_transformers.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    assert [piece.decode(errors="replace") for piece in pieces] == theirs


def test_gpt2_s_tokenizer_is_found_by_its_name(from_transformers):
    assert gpt2_tokenizer().encode("Hello world") == [15496, 995]
    plain = "Hello, world: it isn't 3.14.\n"
    assert gpt2_tokenizer().encode(plain) == from_transformers.encode(plain)


def test_a_byte_that_is_none_is_refused():
    with pytest.raises(ValueError, match="256"):
        ByteTokenizer().decode([257])


# --- from characters to tokens --------------------------------------------------------------------


def test_the_tokens_of_a_span_are_the_fewest_that_hold_its_bytes(tokenizer):
    text = AWKWARD * 3
    ids = tokenizer.encode(text)
    pieces = tokenizer.pieces(ids)
    dice = random.Random(0)
    for _ in range(300):
        start, end = sorted(dice.sample(range(len(text) + 1), 2))
        (first, last) = token_spans(tokenizer, text, [(start, end)])[0]
        before, until = len(text[:start].encode()), len(text[:end].encode())
        reach = [len(b"".join(pieces[:n])) for n in (first, first + 1, last - 1, last)]
        assert reach[0] <= before < reach[1]
        assert reach[2] < until <= reach[3]


def test_the_spans_of_ascii_are_those_of_transformers(from_transformers):
    text = source_documents(["argparse"])[0].text[:5000]
    offsets = from_transformers(text, return_offsets_mapping=True)["offset_mapping"]
    spans = token_spans(BytePairTokenizer(from_transformers), text, offsets)
    assert spans == [(n, n + 1) for n in range(len(offsets))]


def test_only_tokens_of_the_wanted_characters_are_wanted(tokenizer):
    text = "? locker Kov: 47.\n"
    encoded = encode(tokenizer, text, [(14, 16)])
    wanted = [i for i, w in zip(encoded.tokens, encoded.wanted, strict=True) if w]
    assert tokenizer.decode(wanted).strip() == "47"
    assert encode(tokenizer, text) == Encoded(encoded.tokens)


@pytest.mark.parametrize("span", [(2, 2), (3, 2), (-1, 2), (0, 99)])
def test_what_is_no_span_of_the_text_is_refused(tokenizer, span):
    with pytest.raises(ValueError, match="no span of a text of 5"):
        token_spans(tokenizer, "abcde", [span])


def test_tokens_of_another_text_are_refused(tokenizer):
    with pytest.raises(ValueError, match="do not spell"):
        token_spans(tokenizer, "abc", [(0, 1)], tokens=tokenizer.encode("abcd"))
    with pytest.raises(ValueError, match="2 tokens, but 1 mark"):
        Encoded([1, 2], [True])
