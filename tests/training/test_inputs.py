"""Whatever is given: the right value, or an error of the lab that says what is wrong."""

import itertools
import math
import resource
import signal

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labsupport.attention.inputs import AttentionInputError
from labsupport.precision import compute_loss
from labsupport.training import (
    ByteTokenizer,
    CheckpointError,
    Checkpoints,
    Decoder,
    DecoderConfig,
    History,
    MemoryOptions,
    ResumeError,
    TrainConfig,
    batches,
    chunked_cross_entropy,
    documents_from,
    pack,
    source_documents,
    train,
)
from labsupport.training.config import IGNORED
from labsupport.training.consistency import together as apart_by
from labsupport.training.data import generated, together
from labsupport.training.history import StepRow
from labsupport.training.savings import in_chunks, shared_gradient
from labsupport.training.tokens import Encoded, encode
from labsupport.training.train import learning_rate, write_text

quickly = settings(max_examples=60, deadline=None, database=None, derandomize=True)
VOCABULARY = 11
ROTARY = DecoderConfig(VOCABULARY, 16, 1, 2)
LEARNED = DecoderConfig(VOCABULARY, 16, 1, 2, positions="learned", max_positions=8)
small = st.integers(-2, 12)


@st.composite
def batches_of_tokens(draw):
    """Tokens, labels, positions and offsets: often right, and often wrong in one of them."""
    shape = draw(st.tuples(st.integers(0, 3), st.integers(0, 10)) | st.just((1, 6)))
    dtype = draw(st.sampled_from([torch.int64] * 4 + [torch.int32, torch.float32]))
    ids = torch.tensor(draw(st.lists(st.integers(0, 10) | small, min_size=30, max_size=30)))
    tokens = ids[: shape[0] * shape[1]].reshape(shape).to(dtype)
    offsets = st.lists(st.integers(-1, 10), max_size=4).map(lambda some: [0, *some, shape[1]])
    cu_seqlens = draw(st.none() | offsets | st.lists(small, max_size=4))
    places = st.integers(0, 9).map(lambda first: torch.arange(first, first + shape[1]))
    odd = st.sampled_from([torch.tensor([3]), torch.zeros(3, 1).long(), torch.arange(6.0)])
    positions = draw(st.none() | places | odd)
    labels = tokens.long().clone()
    if labels.numel() and draw(st.booleans()):
        labels.view(-1)[0] = draw(st.sampled_from([IGNORED, -1, VOCABULARY]))
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int64)
    return tokens, labels, {"positions": positions, "cu_seqlens": offsets}


def document_by_document(model, tokens, positions, cu_seqlens):
    """The logits of each document alone."""
    cuts = [0, tokens.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = []
    for start, end in itertools.pairwise(cuts):
        if start < end:
            place = None if positions is None else positions[..., start:end]
            parts.append(model(tokens[:, start:end], positions=place))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("config", [ROTARY, LEARNED], ids=["rotary", "learned"])
@quickly
@given(batches_of_tokens())
def test_a_decoder_keeps_documents_apart_or_refuses(config, given):
    tokens, labels, options = given
    torch.manual_seed(0)
    model = Decoder(config, MemoryOptions(attention="standard")).double()
    try:
        logits = model(tokens, **options)
    except (ValueError, AttentionInputError) as error:
        assert str(error)  # noqa: PT017
        return
    torch.testing.assert_close(logits, document_by_document(model, tokens, **options))
    try:
        loss = model(tokens, labels, **options)
    except ValueError:
        assert labels.min() == -1 or labels.max() == VOCABULARY
        return
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected / max(1, (labels != IGNORED).sum()))


@quickly
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(-1, 300) | st.none(),
    st.integers(1, 20_000),
)
def test_a_loss_is_its_oracle_rounded_once_or_refused(given, dtype, chunk, tokens):
    logits = torch.linspace(-30, 30, 3 * tokens).reshape(-1, 3).to(given)
    labels = torch.arange(tokens) % 3
    if chunk is not None and chunk < 1:
        with pytest.raises(ValueError, match="chunk_size"):
            compute_loss(logits, labels, dtype=dtype, chunk_size=chunk)
        return
    chunk = chunk and max(chunk, tokens // 20)
    loss = compute_loss(logits, labels, dtype=dtype, chunk_size=chunk)
    exact = F.cross_entropy(logits.double(), labels)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(exact.item(), rel=4 * torch.finfo(dtype).eps + 1e-6)


def test_a_loss_of_float16_does_not_overflow_in_its_sum():
    logits = torch.tensor([[0.0, 20.0]]).expand(20_000, 2)  # 400,000 in all
    labels = torch.zeros(20_000, dtype=torch.int64)
    assert compute_loss(logits, labels, dtype=torch.float16).item() == 20


# --- documents ------------------------------------------------------------------------------------


def test_a_string_is_one_path_and_one_name(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("some text")
    named = [documents_from(given) for given in (str(notes), notes, [notes], iter([notes]))]
    assert named == [named[0]] * 4
    assert named[0][0].text == "some text"
    assert [document.name[:8] for document in source_documents("argparse")] == ["argparse"]
    assert MemoryOptions.named("checkpoint") == MemoryOptions(checkpoint=True)
    for nothing in ("", ["", notes]):
        with pytest.raises(ValueError, match="empty path"):
            documents_from(nothing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no text in .*empty"):
        documents_from(iter([tmp_path / "empty"]))


@quickly
@given(
    st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=4),
    small,
    small,
    st.integers(-3, 9),
)
def test_each_token_comes_once_an_epoch_or_the_call_is_refused(documents, length, count, step):
    try:
        stream = batches(documents, length, end_token=256, accumulation=count)
        sequences = stream(step)
    except ValueError:
        assert not documents or length < 2 or count < 1 or step < 0
        return
    assert len(sequences) == count
    epoch = -(-sum(len(document) + 1 for document in documents) // length)
    whole = [packed for one in range(epoch * count) for packed in stream(one)][:epoch]
    ids = torch.cat([packed.tokens[0, : length - packed.padding] for packed in whole])
    assert sorted(ids.tolist()) == sorted(itertools.chain(*documents, [256] * len(documents)))


@pytest.mark.parametrize("documents", ["a text", ["a text"], [1, 2], [[1.7, 2]], [None]])
def test_documents_that_are_no_tokens_are_refused(documents):
    with pytest.raises(TypeError, match="encode a text first"):
        list(pack(documents, 8, end_token=0))
    (packed,) = pack([torch.arange(3)], 4, end_token=7)
    assert packed.tokens.tolist() == [[0, 1, 2, 7]]


def test_sequences_that_cannot_be_joined_or_counted_are_refused():
    four, five = (next(pack([[1, 2]], length, end_token=0)) for length in (4, 5))
    for sequences, batch in (([four], 0), ([four], -1), ([four, five], 2)):
        with pytest.raises(ValueError, match="batch is"):
            together(sequences, batch, apart=True)
    with pytest.raises(ValueError, match="accumulation"):
        generated(lambda seed: [seed], 4, end_token=0, accumulation=0)
    with pytest.raises(ValueError, match="count from 0"):
        generated(lambda seed: [seed], 4, end_token=0)(-1)


@quickly
@given(st.text(max_size=8), st.lists(st.tuples(small, small), max_size=3))
def test_wanted_spans_lie_in_the_text(text, spans):
    valid = all(0 <= start <= end <= len(text) for start, end in spans)
    if not valid:
        with pytest.raises(ValueError, match="span"):
            encode(ByteTokenizer(), text, spans)
        return
    wanted = encode(ByteTokenizer(), text, spans).wanted
    assert wanted == [
        any(start <= i < end for start, end in spans)
        for i, character in enumerate(text)
        for _ in character.encode()
    ]


def test_tokens_and_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 tokens, but wanted has 2"):
        Encoded([1, 2, 3], [True, False])
    for wrong in (-1, 257):
        with pytest.raises(ValueError, match="is no token"):
            ByteTokenizer().decode([65, wrong])


# --- settings -------------------------------------------------------------------------------------

SETTINGS = (
    *("steps", "learning_rate", "weight_decay", "max_grad_norm", "final_fraction", "seed", "keep"),
    *("betas", "gradient_accumulation_steps", "checkpoint_every"),
)
SIZES = (
    *("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width", "max_positions"),
    *("rope_base", "rope_scaling", "norm_eps"),
)
odd_numbers = st.sampled_from([-1, 0, 0.5, 2, 2.5, math.nan, math.inf, -math.inf])


@quickly
@given(
    st.sampled_from(SETTINGS),
    odd_numbers,
)
def test_settings_are_sensible_or_refused(name, value):
    given = {"steps": 10} | {name: (value, 0.9) if name == "betas" else value}
    try:
        chosen = TrainConfig(**given)
    except ValueError as error:
        assert name in str(error)  # noqa: PT017
        return
    assert value >= 0
    rates = [learning_rate(step, chosen) for step in range(int(chosen.steps) + 1)]
    assert all(0 <= rate < math.inf for rate in rates)


@quickly
@given(
    st.sampled_from(SIZES),
    st.sampled_from([-1, 0, math.nan, math.inf]),
)
def test_shapes_are_sensible_or_refused(name, value):
    if (name, value) != ("norm_eps", 0):
        with pytest.raises(ValueError, match="must be"):
            DecoderConfig(**{name: value})


def test_numbers_below_zero_are_no_places_from_the_end():
    model = Decoder(ROTARY)
    prompt = torch.zeros(1, 4, dtype=torch.int64)
    for count, context, ids in ((-1, 4, prompt), (1, 0, prompt), (1, 4, prompt[:, :0])):
        with pytest.raises(ValueError, match="context"):
            write_text(model, ids, count, context=context)
    with pytest.raises(ValueError, match="count from 0"):
        learning_rate(-1, TrainConfig(steps=4, warmup_steps=4))


# --- what is stored and compared ------------------------------------------------------------------


def test_a_full_disk_is_called_one(tmp_path):
    """A limit on the size of files does to a writer what a full disk does."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.ones(3)}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"is the disk full, .*iB are free there"):
            checkpoints.save(2, {"x": torch.randn(300_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in checkpoints.paths()] == ["step-000001"]


def test_checkpoints_change_no_dtype_and_keep_the_newest(tmp_path):
    for keep in (0, -1):
        with pytest.raises(ValueError, match="keep"):
            Checkpoints(tmp_path, keep=keep)
    checkpoints = Checkpoints(tmp_path)
    for wrong in (checkpoints.names, lambda: checkpoints.load({})):
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            wrong()
    with pytest.raises(ValueError, match="step is -1"):
        checkpoints.save(-1, {}, {})
    checkpoints.save(1, {"x": torch.tensor([1.5])}, {})
    (tmp_path / "step-old").mkdir()
    for dtype in (torch.int64, torch.bfloat16):
        with pytest.raises(ResumeError, match=r"holds x in torch\.float32"):
            checkpoints.load({"x": torch.zeros(1, dtype=dtype)})


def test_a_loss_that_is_not_a_number_is_no_agreement():
    rows = [
        {"backend": name, "seed": 0, "step": step, "loss": float(step) if ok else math.nan}
        for name, ok in (("standard", True), ("flash", False))
        for step in range(2)
    ]
    assert math.isnan(apart_by(pd.DataFrame([*rows, rows[0] | {"backend": "flash"}])))


def test_the_median_of_two_steps_lies_between_them():
    rows = [StepRow(step, 0.0, 0.0, 0.0, seconds, 12, 0) for step, seconds in enumerate((1.0, 3.0))]
    assert History(rows).tokens_per_s == 8


class Returns(nn.Module):
    """A model whose loss is what a function makes of its weight."""

    def __init__(self, loss):
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.ones(3)), loss

    def forward(self, tokens, labels):
        return self.loss(self.weight)


@pytest.mark.parametrize(
    "loss",
    [lambda w: w * 2, lambda w: {"loss": w.sum()}, lambda w: w.detach().sum(), lambda w: 1.0],
)
def test_a_loss_is_a_scalar_that_depends_on_the_weights(loss):
    batch = {"tokens": torch.ones(1, 3).long(), "labels": torch.ones(1, 3).long()}
    once = TrainConfig(steps=1)
    with pytest.raises(TypeError, match="must return the mean loss"):
        train(Returns(loss), lambda step: [batch], once, progress=False)
    with pytest.raises(TypeError, match="labels must be integers"):
        floating = [batch | {"labels": torch.ones(1, 3)}]
        train(Returns(torch.sum), lambda step: floating, once, progress=False)


def test_a_run_whose_settings_hold_nan_goes_on(tmp_path):
    batch = {"tokens": torch.ones(1, 3).long(), "labels": torch.ones(1, 3).long()}
    for _ in range(2):
        options = {"folder": tmp_path, "run_config": {"least": math.nan}, "progress": False}
        assert len(train(Returns(torch.sum), lambda step: [batch], TrainConfig(2), **options)) == 2


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
def test_a_second_derivative_is_right_or_refused(direct):
    """Also beside a part that has one, where its absence would not be seen."""
    x = torch.randn(1, 6, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    labels = torch.tensor([[0, 1, 2, 3, 4, IGNORED]])

    def shared(x):
        use = shared_gradient(x)
        return (use() * use()).sum()

    refused = [shared, lambda x: chunked_cross_entropy(x, weight, labels, chunk=2)]
    for function in refused:
        with pytest.raises(RuntimeError, match=r"twice \(create_graph=True\)"):
            torch.autograd.grad(function(x) + direct * (x**3).sum(), x, create_graph=True)
    right = [
        (lambda x: in_chunks(lambda part: part**3, x, 2).sum(), lambda x: (x**3).sum()),
        (
            lambda x: compute_loss(x, labels, head=lambda part: part @ weight.T, chunk_size=2),
            lambda x: F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten()),
        ),
    ]
    for ours, theirs in right:
        twice = []
        for function in (ours, theirs):
            (slope,) = torch.autograd.grad(function(x), x, create_graph=True)
            twice.append(torch.autograd.grad((slope**2).sum(), x)[0])
        torch.testing.assert_close(*twice)


def test_what_is_no_label_and_no_size_is_refused():
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    labels = torch.tensor([0, 1, 2, 3])
    for wrong in (labels + 0.7, labels > 1):
        with pytest.raises(TypeError, match="labels must be integers"):
            chunked_cross_entropy(hidden, weight, wrong)
    with pytest.raises(ValueError, match="must be"):
        chunked_cross_entropy(hidden, weight[0], labels)
    for size in (0, -1):
        with pytest.raises(ValueError, match="size is"):
            in_chunks(lambda part: part, hidden, size)
