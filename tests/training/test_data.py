"""Text to tokens to packed sequences: nothing is lost or doubled, and documents stay apart."""

import doctest
import importlib
import platform
import random
import sys
from itertools import pairwise

import pytest
import torch

from labsupport.attention import attention_varlen, available_backends
from labsupport.training.data import (
    DATA,
    FIRST_SEED,
    IGNORED,
    MODULES,
    Document,
    batches,
    documents_of,
    generated,
    help_documents,
    named_batches,
    named_tokenizer,
    pack,
    source_documents,
)
from labsupport.training.facts import records
from labsupport.training.sizes import parse_bytes, parse_tokens
from labsupport.training.tokens import (
    BytePairTokenizer,
    ByteTokenizer,
    Encoded,
    encode,
    gpt2_tokenizer,
)

END = 0
AWKWARD = "Zürich 🦙, 日本語:\n\n\t  x\u0301 \u200d👩\x00 3.14 don't   <|endoftext|>\r\n"


@pytest.mark.parametrize("name", ["data", "facts", "tokens", "sizes"])
def test_the_examples_are_right(name):
    assert doctest.testmod(importlib.import_module(f"labsupport.training.{name}")).failed == 0


# --- sizes ----------------------------------------------------------------------------------------


def test_lengths_and_bytes_are_read():
    assert [parse_tokens(t) for t in ("8192", "8K", "1m", " 2k ")] == [8192, 8192, 2**20, 2048]
    sizes = ("16GiB", "8 GB", "1.5 kB", " 2 tib ", "7B", 4096, "0.1 GiB")
    counts = [2**34, 8 * 10**9, 1500, 2**41, 7, 4096, 2**30 // 10]
    assert [parse_bytes(size) for size in sizes] == counts


@pytest.mark.parametrize("text", ["", "K", "1.5K", "-3", "0K", "8Q", "16 G", "1e9 B", "0 GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no length"):
        parse_tokens(text)
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text.replace("K", " gigabytes"))


# --- real texts and their tokens ------------------------------------------------------------------


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


def test_a_real_document_says_of_which_python_it_is_and_is_not_imported():
    sys.modules.pop("antigravity", None)
    for document in [*help_documents(), *source_documents(["antigravity"])]:
        assert document.name.endswith(f" {platform.python_version()}")
        assert document.text.strip()
    assert "antigravity" not in sys.modules
    assert [d.name.split("'")[0] for d in source_documents()] == list(MODULES)


def test_documents_are_found_by_their_number_of_tokens(tokenizer):
    lengths = [len(tokenizer.encode(document.text)) for document in documents_of(tokenizer, 8192)]
    assert len(lengths) >= 5
    assert min(lengths) >= 8192
    assert lengths == sorted(lengths)
    some = [Document(str(n), "word, " * n) for n in range(1, 60)]
    long = {d.name for d in some if len(tokenizer.encode(d.text)) >= 40}
    assert {document.name for document in documents_of(tokenizer, 40, some)} == long
    with pytest.raises(ValueError, match=r"no document has 1,000 tokens.*records"):
        documents_of(tokenizer, 1000, some)


def test_tokens_give_the_text_back(tokenizer):
    for text in ("", "a", AWKWARD, source_documents(["json"])[0].text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.spans(text)) == len(ids)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.end_token not in tokenizer.encode(AWKWARD)
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_token]) == "a"
    assert tokenizer.decode(tokenizer.encode("🦙")[:-1]) == "\N{REPLACEMENT CHARACTER}"


def test_gpt2_s_tokenizer_is_found_by_its_name():
    assert gpt2_tokenizer().encode("Hello world") == [15496, 995]
    assert (gpt2_tokenizer().vocab_size, gpt2_tokenizer().end_token) == (50_257, 50_256)


def test_tokens_that_cover_a_wanted_character_are_wanted(tokenizer):
    text = "? locker Kov: 47.\n"
    encoded = encode(tokenizer, text, [(14, 16)])
    wanted = [i for i, w in zip(encoded.tokens, encoded.wanted, strict=True) if w]
    assert tokenizer.decode(wanted).strip() == "47"
    assert encode(tokenizer, text) == Encoded(encoded.tokens)
    dice, text = random.Random(0), AWKWARD * 3
    for _ in range(30):
        start, end = sorted(dice.sample(range(len(text) + 1), 2))
        marks = encode(tokenizer, text, [(start, end)]).wanted
        assert marks == [a < end and start < b for a, b in tokenizer.spans(text)]
        # All of the span, in one run, and at most one token more at each side.
        first, last = marks.index(True), len(marks) - marks[::-1].index(True)
        assert all(marks[first:last])
        covered = tokenizer.decode(tokenizer.encode(text)[first:last])
        assert text[start:end] in covered


# --- packing --------------------------------------------------------------------------------------


def some_documents(dice, most=40):
    lengths = [dice.choice([0, 1, 2, 3, 7, 8, 9, 30]) for _ in range(dice.randrange(1, most))]
    return [[dice.randrange(1, 50) for _ in range(n)] for n in lengths]


def parts_of(packed):
    """(tokens, labels, positions) of each document of a sequence, the padding left out."""
    pairs = list(pairwise(packed.cu_seqlens.tolist()))[: -1 if packed.padding else None]
    rows = (packed.tokens[0], packed.labels[0], packed.positions[0])
    return [tuple(row[start:end].tolist() for row in rows) for start, end in pairs]


@pytest.mark.parametrize("seed", range(20))
def test_no_token_is_lost_or_doubled_and_each_predicts_the_next_of_its_document(seed):
    dice = random.Random(seed)
    documents = some_documents(dice)
    sequences = list(pack(documents, dice.choice([2, 3, 8, 31, 64]), end_token=END))
    parts = [part for packed in sequences for part in parts_of(packed)]
    assert [t for part in parts for t in part[0]] == [t for d in documents for t in [*d, END]]
    expected = [label for d in documents for label in [*d, END, IGNORED][1:]]
    assert [label for part in parts for label in part[1]] == expected
    assert all(part[2] == list(range(len(part[2]))) for part in parts)
    assert not any(packed.padding for packed in sequences[:-1])


@pytest.mark.parametrize("seed", range(10))
def test_only_wanted_tokens_become_labels(seed):
    dice = random.Random(seed)
    marked = [Encoded(d, [dice.random() < 0.3 for _ in d]) for d in some_documents(dice)]
    sequences = list(pack(marked, dice.choice([2, 5, 16]), end_token=END))
    labels = [label for packed in sequences for part in parts_of(packed) for label in part[1]]
    expected = []
    for document in marked:
        pairs = zip(document.tokens, document.wanted, strict=True)
        marks = [token if wanted else IGNORED for token, wanted in pairs]
        expected += [*marks[1:], IGNORED, IGNORED] if marks else [IGNORED]
    assert labels == expected


def test_a_sequence_has_the_shapes_and_dtypes_of_training_and_padding_teaches_nothing():
    first, second = pack([[1] * 2, [2] * 9], 8, end_token=END)
    assert first.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert second.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert (second.cu_seqlens.tolist(), second.padding) == ([0, 5, 8], 3)
    assert second.tokens[0, 5:].tolist() == [END] * 3
    assert (second.labels[0, 5:] == IGNORED).all()
    for tensor in (first.tokens, first.labels, first.positions):
        assert (tensor.shape, tensor.dtype) == ((1, 8), torch.int64)
    assert first.cu_seqlens.dtype == torch.int32
    assert list(pack([], 8, end_token=END)) == []
    with pytest.raises(ValueError, match="2 tokens or more, not 1"):
        list(pack([[1]], 1, end_token=END))


PACKED = next(pack([[1] * 6, [2] * 12, [3] * 20], 32, end_token=END))


def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, heads, 16, generator=generator) for heads in (4, 2, 2)]


def backends_that_pack():
    offsets = {"cu_seqlens_q": PACKED.cu_seqlens, "cu_seqlens_k": PACKED.cu_seqlens}
    table = available_backends(*qkv(), causal=True, **offsets)
    return [status.name for status in table if status.runs]


@pytest.mark.parametrize("backend", backends_that_pack())
def test_a_document_s_tokens_change_no_other_document_s_output(backend):
    before, after = qkv(), qkv()
    for tensor in after:
        tensor[7:20] += 3.0  # the document in the middle

    def unchanged(offsets):
        one, two = (
            attention_varlen(*tensors, offsets, offsets, causal=True, backend=backend)
            for tensors in (before, after)
        )
        return (one == two).flatten(1).all(dim=1)

    same = unchanged(PACKED.cu_seqlens)
    assert same[:7].all()
    assert same[20:].all()
    assert not same[7:20].any()
    # Without the offsets the last document would see it.
    assert not unchanged(torch.tensor([0, 32], dtype=torch.int32))[20:].any()


# --- streams --------------------------------------------------------------------------------------


def same(a, b):
    names = ("tokens", "labels", "cu_seqlens")
    pairs = zip(a, b, strict=True)
    return all(getattr(one, n).equal(getattr(two, n)) for one, two in pairs for n in names)


def test_a_run_that_resumes_at_any_step_sees_the_same_data():
    documents = some_documents(random.Random(1))
    options = {"end_token": END, "seed": 7, "accumulation": 3}
    whole = [stream(step) for stream in [batches(documents, 32, **options)] for step in range(25)]
    for step in (24, 0, 11, 12):
        assert same(batches(documents, 32, **options)(step), whole[step])
    backwards = batches(documents, 32, **options)
    assert all(same(backwards(step), whole[step]) for step in reversed(range(25)))
    other = batches(documents, 32, **options | {"seed": 8})
    assert not same(other(0), whole[0])


def test_each_epoch_has_every_document_once_in_another_order():
    documents = [[n] * (1 + n % 6) for n in range(1, 40)]
    stream = batches(documents, 16, end_token=END, seed=1)
    epoch = -(-sum(len(d) + 1 for d in documents) // 16)
    orders = []
    for number in range(3):
        sequences = [stream(step)[0] for step in range(number * epoch, (number + 1) * epoch)]
        tokens = [t for packed in sequences for part in parts_of(packed) for t in part[0]]
        orders.append([t for t in tokens if t != END])
        assert sorted(orders[-1]) == sorted(t for d in documents for t in d)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for refused in ({"accumulation": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=r"at least|or more"):
            batches(documents, 16, end_token=END, **refused)


def facts(seed):
    document = records(255, seed=seed, facts=6, questions=6, ask="throughout")
    return encode(ByteTokenizer(), document.text, document.answers)


def test_generated_documents_are_whole_never_come_again_and_their_answers_are_labels():
    stream = generated(facts, 256, end_token=256, accumulation=2)
    rows = [packed.tokens[0].tolist() for step in range(4) for packed in stream(step)]
    assert len({tuple(row) for row in rows}) == 8
    assert rows[5] == [*facts(FIRST_SEED + 5).tokens, 256]
    document = records(255, seed=FIRST_SEED, facts=6, questions=6, ask="throughout")
    labels = stream(0)[0].labels
    answers = "".join(question.answer for question in document.questions)
    assert ByteTokenizer().decode(labels[labels != IGNORED]) == answers
    with pytest.raises(ValueError, match="more than 100 tokens"):
        generated(facts, 100, end_token=256)(0)


@pytest.mark.parametrize("data", DATA)
def test_each_text_gives_the_same_batches_for_the_same_step_and_validation_other_ones(data):
    def stream(**options):
        chosen = {"accumulation": 2, "seed": 3} | options
        return named_batches(data, named_tokenizer("bytes"), 4096, **chosen)

    first, second = stream()(5)
    assert first.tokens.shape == second.labels.shape == (1, 4096)
    assert not torch.equal(first.tokens, second.tokens)
    assert torch.equal(stream()(5)[1].tokens, second.tokens)
    assert not torch.equal(stream(seed=4)(5)[0].tokens, first.tokens)
    held_out = bytes(stream(split="validation")(0)[0].tokens[0, 1000:1100].tolist())
    shown = stream(split="training")
    assert not any(held_out in bytes(p.tokens[0] % 256) for step in range(40) for p in shown(step))
