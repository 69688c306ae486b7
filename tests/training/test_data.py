"""Text to tokens to packed sequences: nothing is lost or doubled, and documents stay apart."""

import doctest
import importlib
import platform
import random
from itertools import pairwise

import pytest
import torch

from labsupport.profiling.units import parse_bytes, parse_tokens
from labsupport.training.data import (
    DATA,
    FIRST_SEED,
    IGNORED,
    MODULES,
    batches,
    data_origin,
    documents_from,
    generated,
    help_documents,
    named_batches,
    named_tokenizer,
    pack,
    source_documents,
)
from labsupport.training.tasks.facts import records
from labsupport.training.tokens import ByteTokenizer, Encoded, encode, gpt2_tokenizer

END = 0
AWKWARD = "Zürich 🦙, 日本語:\n\n\t  x\u0301 \u200d👩\x00 3.14 don't   <|endoftext|>\r\n"


@pytest.mark.parametrize(
    "name",
    [
        *("training.data", "training.tasks.facts"),
        *("training.chunked_loss", "training.memory_limit", "training.savings"),
        *("training.planner", "training.tokens", "profiling.units"),
        *("distributed.data_parallel.costs", "distributed.ring.plan"),
        *("distributed.scaling", "profiling.grids"),
    ],
)
def test_the_examples_are_right(name):
    tested = doctest.testmod(
        importlib.import_module(f"labsupport.{name}"), optionflags=doctest.ELLIPSIS
    )
    assert tested.attempted > tested.failed == 0


# --- sizes ----------------------------------------------------------------------------------------


def test_lengths_and_bytes_are_read_and_what_is_no_size_is_refused():
    assert [parse_tokens(t) for t in ("8192", "8K", "1m", " 2k ")] == [8192, 8192, 2**20, 2048]
    sizes = ("16GiB", "8 GB", "1.5 kB", " 2 tib ", "7B", 4096, "0.1 GiB")
    counts = [2**34, 8 * 10**9, 1500, 2**41, 7, 4096, 2**30 // 10]
    assert [parse_bytes(size) for size in sizes] == counts

    for text in ("", "K", "1.5K", "-3", "0K", "8Q", "16 G", "1e9 B", "0 GiB"):
        with pytest.raises(ValueError, match="is no length"):
            parse_tokens(text)
        with pytest.raises(ValueError, match="size"):
            parse_bytes(text.replace("K", " gigabytes"))


# --- real texts and their tokens ------------------------------------------------------------------


@pytest.fixture(params=[ByteTokenizer, gpt2_tokenizer])
def tokenizer(request):
    return request.param()


def test_real_documents_say_of_which_python_they_are():
    assert [d.name.split("'")[0] for d in source_documents()] == list(MODULES)
    for document in help_documents():
        assert document.name.endswith(f" {platform.python_version()}")
        assert document.text.strip()


def test_tokens_give_the_text_back(tokenizer):
    for text in ("", "a", AWKWARD, source_documents(["json"])[0].text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.spans(text)) == len(ids)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.end_token not in tokenizer.encode(AWKWARD)
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_token]) == "a"
    assert tokenizer.decode(tokenizer.encode("🦙")[:-1]) == "\N{REPLACEMENT CHARACTER}"
    known = {257: ([72, 105], 256), 50_257: ([17250], 50_256)}
    assert (tokenizer.encode("Hi"), tokenizer.end_token) == known[tokenizer.vocab_size]


def test_tokens_that_cover_a_wanted_character_are_wanted(tokenizer):
    text = "? locker Kov: 47.\n"
    encoded = encode(tokenizer, text, [(14, 16)])
    wanted = [i for i, w in zip(encoded.tokens, encoded.wanted, strict=True) if w]
    assert tokenizer.decode(wanted).strip() == "47"
    assert encode(tokenizer, text) == Encoded(encoded.tokens)
    for start, end in ((0, 3), (5, 9), (16, 40), (len(AWKWARD) - 1, len(AWKWARD))):
        encoded = encode(tokenizer, AWKWARD, [(start, end)])
        spans = tokenizer.spans(AWKWARD)
        assert encoded.wanted == [a < end and start < b for a, b in spans]
        covered = [i for i, w in zip(encoded.tokens, encoded.wanted, strict=True) if w]
        assert AWKWARD[start:end] in tokenizer.decode(covered)


def test_own_documents_are_text_files_by_path_and_the_last_tenth_of_each_is_for_validation(
    tmp_path,
):
    texts = {"b.txt": "b" * 100, "a/c.md": "Zürich\n" * 10, "a/.git/config": "hidden", "empty": " "}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "a" / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    documents = documents_from([tmp_path])
    assert [d.text for d in documents] == [texts["a/c.md"], texts["b.txt"]]
    assert documents[1].name == str(tmp_path / "b.txt")
    assert documents_from([str(tmp_path / "b.txt"), tmp_path / "a"]) == documents[::-1]
    for name, error, message in (
        ("latin.txt", ValueError, "latin.txt is not a text file in UTF-8"),
        ("empty", ValueError, "no text in"),
        ("none", FileNotFoundError, "none"),
    ):
        with pytest.raises(error, match=message):
            documents_from([tmp_path / name])

    def characters(split):
        (packed,) = named_batches([tmp_path], ByteTokenizer(), 182, split=split)(0)
        return ByteTokenizer().decode(packed.tokens[0]).count("b")

    assert [characters(split) for split in ("all", "training", "validation")] == [100, 90, 10]
    before = data_origin([tmp_path])
    assert before.startswith("2 files with SHA-256 ")
    (tmp_path / "b.txt").write_text("c" * 100)
    assert data_origin([tmp_path]) != before


# --- packing --------------------------------------------------------------------------------------


def some_documents(dice, most=40):
    lengths = [dice.choice([0, 1, 2, 3, 7, 8, 9, 30]) for _ in range(dice.randrange(1, most))]
    return [[dice.randrange(1, 50) for _ in range(n)] for n in lengths]


def parts_of(packed):
    """(tokens, labels, positions) of each document of a sequence, the padding left out."""
    pairs = list(pairwise(packed.cu_seqlens.tolist()))[: -1 if packed.padding else None]
    rows = (packed.tokens[0], packed.labels[0], packed.positions[0])
    return [tuple(row[start:end].tolist() for row in rows) for start, end in pairs]


@pytest.mark.parametrize("length", [2, 3, 8, 31, 64])
def test_no_token_is_lost_or_doubled_and_each_predicts_the_next_of_its_document(length):
    dice = random.Random(length)
    documents = some_documents(dice)
    marked = [Encoded(d, [dice.random() < 0.3 for _ in d]) for d in documents]
    plain, wanted = (list(pack(each, length, end_token=END)) for each in (documents, marked))
    parts, marks = ([p for packed in each for p in parts_of(packed)] for each in (plain, wanted))
    assert [t for part in parts for t in part[0]] == [t for d in documents for t in [*d, END]]
    expected = [label for d in documents for label in [*d, END, IGNORED][1:]]
    assert [label for part in parts for label in part[1]] == expected
    assert all(part[2] == list(range(len(part[2]))) for part in parts)
    assert not any(packed.padding for packed in plain[:-1])
    # Only wanted tokens become labels.
    expected = []
    for document in marked:
        pairs = zip(document.tokens, document.wanted, strict=True)
        tokens = [token if wanted else IGNORED for token, wanted in pairs]
        expected += [*tokens[1:], IGNORED, IGNORED] if tokens else [IGNORED]
    assert [label for part in marks for label in part[1]] == expected
    last = plain[-1]
    assert last.labels[0, length - last.padding :].eq(IGNORED).all()
    assert (last.tokens.shape, last.tokens.dtype) == ((1, length), torch.int64)
    assert last.cu_seqlens.dtype == torch.int32
    with pytest.raises(ValueError, match=r"2 tokens or more, .*not 1"):
        list(pack([[1]], 1, end_token=END))


# --- streams --------------------------------------------------------------------------------------


def rows(packed):
    return [(p.tokens.tolist(), p.labels.tolist(), p.cu_seqlens.tolist()) for p in packed]


def test_each_epoch_has_every_document_once_in_another_order_for_the_same_step_the_same():
    documents = [[n] * (1 + n % 6) for n in range(1, 40)]

    def stream(seed=1):
        return batches(documents, 16, end_token=END, seed=seed, accumulation=2)

    epoch = -(-sum(len(d) + 1 for d in documents) // 16)
    whole = [packed for step in map(stream(), range(2 * epoch)) for packed in step]
    orders = []
    for number in range(3):
        sequences = whole[number * epoch : (number + 1) * epoch]
        tokens = [t for packed in sequences for part in parts_of(packed) for t in part[0]]
        orders.append([t for t in tokens if t != END])
        assert sorted(orders[-1]) == sorted(t for d in documents for t in d)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    backwards = stream()
    for step in (20, 12, 11, 0):
        expected = rows(whole[2 * step : 2 * step + 2])
        assert rows(backwards(step)) == rows(stream()(step)) == expected
    assert rows(stream(seed=2)(0)) != rows(whole[:2])
    for refused in ({"accumulation": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=r"at least|or more"):
            batches(documents, 16, end_token=END, **refused)


def facts(seed):
    document = records(255, seed=seed, facts=6, questions=6, ask="throughout")
    return encode(ByteTokenizer(), document.text, document.answers)


def test_generated_documents_are_whole_never_come_again_and_their_answers_are_labels():
    stream = generated(facts, 256, end_token=256, accumulation=2)
    texts = [packed.tokens[0].tolist() for step in range(4) for packed in stream(step)]
    assert len({tuple(text) for text in texts}) == 8
    assert texts[5] == [*facts(FIRST_SEED + 5).tokens, 256]
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
    assert rows(stream()(5)) == rows([first, second])
    assert not torch.equal(stream(seed=4)(5)[0].tokens, first.tokens)

    def texts(split, steps):
        taken = stream(split=split)
        packed = [each for step in range(steps) for each in taken(step)]
        return [each.tokens.to(torch.uint8).numpy().tobytes() for each in packed]

    held_out, shown = texts("validation", 1)[0], texts("training", 20)
    assert not any(held_out[1000:1100] in text for text in shown)
