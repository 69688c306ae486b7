"""Packed sequences: no token is lost or doubled, and no document sees another one."""

import random
from itertools import pairwise

import pytest
import torch

from labsupport.attention import BackendUnavailableError, attention_varlen, available_backends
from labsupport.training.documents.facts import records
from labsupport.training.documents.packing import IGNORED, pack
from labsupport.training.documents.streams import FIRST_SEED, batches, generated
from labsupport.training.documents.tokens import ByteTokenizer, Encoded, encode

END, PAD = 0, 99


def some_documents(dice, most=40):
    lengths = [dice.choice([0, 1, 2, 3, 7, 8, 9, 30]) for _ in range(dice.randrange(1, most))]
    return [[dice.randrange(1, 50) for _ in range(n)] for n in lengths]


def pieces_of(packed):
    """(tokens, labels, positions) of each document of a sequence, the padding left out."""
    bounds = packed.cu_seqlens.tolist()
    pairs = list(pairwise(bounds))[: -1 if packed.padding else None]
    rows = (packed.tokens[0], packed.labels[0], packed.positions[0])
    return [tuple(row[start:end].tolist() for row in rows) for start, end in pairs]


def reassembled(sequences):
    """The documents that were packed: what lies between two end tokens."""
    documents, open_one = [], []
    for packed in sequences:
        for tokens, _, _ in pieces_of(packed):
            open_one += tokens
            assert END not in tokens[:-1]
            if tokens[-1] == END:
                documents.append(open_one[:-1])
                open_one = []
    assert not open_one
    return documents


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_no_token_is_lost_or_doubled(seed, cut):
    dice = random.Random(seed)
    documents = some_documents(dice)
    length = dice.choice([2, 3, 8, 31, 64]) if cut else dice.choice([31, 64])
    sequences = list(pack(documents, length, end_token=END, pad_token=PAD, cut=cut))
    assert reassembled(sequences) == documents
    padding = sum(int((packed.tokens == PAD).sum()) for packed in sequences)
    assert padding == sum(packed.padding for packed in sequences)
    if cut:
        assert not any(packed.padding for packed in sequences[:-1])


@pytest.mark.parametrize("seed", range(30))
def test_each_token_predicts_the_next_of_its_document_also_over_a_cut(seed):
    dice = random.Random(seed)
    documents = some_documents(dice)
    sequences = list(pack(documents, dice.choice([2, 5, 16]), end_token=END))
    labels = [label for packed in sequences for piece in pieces_of(packed) for label in piece[1]]
    expected = [label for d in documents for label in [*d, END, IGNORED][1:]]
    assert labels == expected


@pytest.mark.parametrize("seed", range(30))
def test_only_wanted_tokens_become_labels(seed):
    dice = random.Random(seed)
    documents = some_documents(dice)
    marked = [Encoded(d, [dice.random() < 0.3 for _ in d]) for d in documents]
    sequences = list(pack(marked, dice.choice([2, 5, 16]), end_token=END))
    labels = [label for packed in sequences for piece in pieces_of(packed) for label in piece[1]]
    expected = []
    for document in marked:
        pairs = zip(document.tokens, document.wanted, strict=True)
        marks = [token if wanted else IGNORED for token, wanted in pairs]
        expected += [*marks[1:], IGNORED, IGNORED] if marks else [IGNORED]
    assert labels == expected


def test_everything_has_the_shape_and_dtype_that_training_takes():
    for packed in pack([[1] * 11, [2] * 3], 6, end_token=END):
        for tensor in (packed.tokens, packed.labels, packed.positions):
            assert (tensor.shape, tensor.dtype) == ((1, 6), torch.int64)
        assert packed.cu_seqlens.dtype == torch.int32
        assert packed.cu_seqlens[0] == 0
        assert packed.cu_seqlens[-1] == 6
        assert (packed.cu_seqlens.diff() > 0).all()
        assert packed.to("cpu").tokens.equal(packed.tokens)


def test_positions_begin_anew_in_each_document_and_after_a_cut():
    first, second = pack([[1] * 2, [2] * 9], 8, end_token=END, pad_token=PAD)
    assert first.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert second.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert second.cu_seqlens.tolist() == [0, 5, 8]


def test_padding_is_a_last_document_that_teaches_nothing():
    (packed,) = pack([[1, 2, 3]], 10, end_token=END, pad_token=PAD)
    assert packed.padding == 6
    assert packed.cu_seqlens.tolist() == [0, 4, 10]
    assert packed.tokens[0, 4:].tolist() == [PAD] * 6
    assert (packed.labels[0, 4:] == IGNORED).all()


def test_without_cuts_each_document_is_in_one_sequence():
    documents = [[1] * 5, [2] * 5, [3] * 2, [4] * 9]
    sequences = list(pack(documents, 10, end_token=END, cut=False))
    assert [packed.padding for packed in sequences] == [4, 1, 0]
    with pytest.raises(ValueError, match=r"document 1 has 11 tokens.*a sequence 10"):
        list(pack([[1], [2] * 10], 10, end_token=END, cut=False))


def test_no_documents_make_no_sequences_and_one_token_is_no_sequence():
    assert list(pack([], 8, end_token=END)) == []
    with pytest.raises(ValueError, match="2 tokens or more, not 1"):
        list(pack([[1]], 1, end_token=END))


# --- attention keeps documents apart --------------------------------------------------------------

PACKED = next(pack([[1] * 6, [2] * 12, [3] * 20], 32, end_token=END))


def qkv(packed):
    generator = torch.Generator().manual_seed(0)
    n = packed.tokens.shape[1]
    return [torch.randn(n, heads, 16, generator=generator) for heads in (4, 2, 2)]


def who_runs():
    offsets = {"cu_seqlens_q": PACKED.cu_seqlens, "cu_seqlens_k": PACKED.cu_seqlens}
    table = available_backends(*qkv(PACKED), causal=True, **offsets)
    return [status.name for status in table if status.runs]


def test_several_backends_take_packed_sequences_on_a_cpu():
    assert {"sdpa_flash", "flash_torch", "sdpa_math", "standard"} <= set(who_runs())


@pytest.mark.parametrize("backend", who_runs())
def test_a_document_s_tokens_change_no_other_document_s_output(backend):
    offsets = PACKED.cu_seqlens
    assert offsets.tolist() == [0, 7, 20, 32]
    before = qkv(PACKED)
    after = [tensor.clone() for tensor in before]
    for tensor in after:
        tensor[7:20] += 3.0  # the document in the middle
    one, two = (
        attention_varlen(*tensors, offsets, offsets, causal=True, backend=backend)
        for tensors in (before, after)
    )
    same = (one == two).flatten(1).all(dim=1)
    assert same[:7].all()
    assert same[20:].all()
    assert not same[7:20].any()
    # Without cu_seqlens the last document would see it.
    whole = torch.tensor([0, 32], dtype=torch.int32)
    one, two = (
        attention_varlen(*tensors, whole, whole, causal=True, backend=backend)
        for tensors in (before, after)
    )
    assert not (one[20:] == two[20:]).flatten(1).all(dim=1).any()


def test_flex_attention_refuses_packed_sequences_and_names_who_takes_them():
    offsets = PACKED.cu_seqlens
    with pytest.raises(BackendUnavailableError, match="packed sequences") as refusal:
        attention_varlen(*qkv(PACKED), offsets, offsets, causal=True, backend="flex")
    assert "sdpa_flash" in str(refusal.value)


# --- streams --------------------------------------------------------------------------------------


def same(a, b):
    pairs = zip(a, b, strict=True)
    return all(
        one.tokens.equal(two.tokens)
        and one.labels.equal(two.labels)
        and one.cu_seqlens.equal(two.cu_seqlens)
        for one, two in pairs
    )


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_run_that_resumes_at_any_step_sees_the_same_data(accumulation, cut):
    documents = some_documents(random.Random(1))
    options = {"end_token": END, "seed": 7, "accumulation": accumulation, "cut": cut}
    whole = [stream(step) for stream in [batches(documents, 32, **options)] for step in range(25)]
    for step in (24, 0, 11, 12, 5):
        assert same(batches(documents, 32, **options)(step), whole[step])
    backwards = batches(documents, 32, **options)
    assert all(same(backwards(step), whole[step]) for step in reversed(range(25)))


@pytest.mark.parametrize("cut", [True, False])
def test_each_epoch_has_every_document_once_in_another_order(cut):
    documents = [[n] * (1 + n % 6) for n in range(1, 40)]
    stream = batches(documents, 16, end_token=END, seed=1, cut=cut)
    orders, step = [], 0
    for _ in range(3):
        epoch = []
        while sum(len(p.tokens[0]) - p.padding for p in epoch) < sum(len(d) + 1 for d in documents):
            epoch += stream(step)
            step += 1
        orders.append(reassembled(epoch))
        assert sorted(orders[-1]) == sorted(documents)
    assert documents not in orders
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_without_shuffling_each_epoch_is_the_first():
    documents = [[1, 2, 3], [4, 5]]
    stream = batches(documents, 4, end_token=END, shuffle=False)
    assert [stream(n)[0].tokens.tolist() for n in range(4)] == [
        [[1, 2, 3, END]],
        [[4, 5, END, END]],
    ] * 2


def test_another_seed_gives_another_order():
    documents = [[n] for n in range(1, 40)]
    first, second = (batches(documents, 16, end_token=END, seed=s)(0) for s in (0, 1))
    assert not same(first, second)


def facts(seed):
    document = records(255, seed=seed, facts=6, questions=6, ask="throughout")
    return encode(ByteTokenizer(), document.text, document.answers)


def test_generated_documents_are_whole_and_never_come_again():
    make = generated(facts, 512, end_token=256, documents=2, accumulation=2)
    seen = [row for step in range(4) for packed in make(step) for row in pieces_of(packed)]
    assert len(seen) == 16
    assert len({tuple(tokens) for tokens, _, _ in seen}) == 16
    assert all(len(tokens) == 256 for tokens, _, _ in seen)
    assert seen[5][0] == [*facts(FIRST_SEED + 5).tokens, 256]
    assert same(generated(facts, 512, end_token=256, documents=2, accumulation=2)(3), make(3))


def test_trained_on_answers_the_labels_are_the_answers():
    (packed,) = generated(facts, 256, end_token=256)(0)
    document = records(255, seed=FIRST_SEED, facts=6, questions=6, ask="throughout")
    answers = "".join(question.answer for question in document.questions)
    assert ByteTokenizer().decode(packed.labels[packed.labels != IGNORED]) == answers


def test_generated_documents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 documents take more than 512 tokens"):
        generated(facts, 512, end_token=256, documents=3)(0)
    with pytest.raises(ValueError, match="a sequence 100"):
        generated(facts, 100, end_token=256)(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: batches([], 8, end_token=END),
        lambda: batches([[1]], 8, end_token=END, accumulation=0),
        lambda: batches([[1]], 8, end_token=END)(-1),
        lambda: batches([[1]], 8, end_token=END, seed=-1)(0),
        lambda: generated(facts, 256, end_token=256, documents=0),
        lambda: generated(facts, 256, end_token=256)(-1),
    ],
)
def test_streams_refuse_what_makes_no_sense(make):
    with pytest.raises(ValueError, match=r"at least|or more|from 0"):
        make()
