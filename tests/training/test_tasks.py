"""Windows: a passage by what stands before it, and a small model that finds facts again."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.recall import Round, save_recall, train_recall
from labsupport.models import source_text
from labsupport.models.sources.build import fetch
from labsupport.models.sources.load import load_tokenizer
from labsupport.paths import data_dir
from labsupport.training import ByteTokenizer, Decoder, DecoderConfig, records
from labsupport.training.data import FIRST_SEED, IGNORED
from labsupport.training.tasks.positions import nll_by_position, with_frequencies
from labsupport.training.tasks.recall import (
    Stage,
    load_recall,
    recall_batches,
    unseen_documents,
)
from labsupport.training.tasks.recall_scores import accuracy_by_window, read_on
from labsupport.training.tasks.windows import nll_by_window, with_repeat
from tests.models.tiny import tiny, tokens

# --- windows --------------------------------------------------------------------------------------


def test_a_window_is_what_is_seen_before_the_passage():
    model, ids = tiny("llama"), tokens(1, 40)

    def loss_of(start, stop, window):
        first = max(0, start - window)
        with torch.no_grad():
            logits = model(ids[:, first:stop]).logits[0, start - first - 1 : -1]
        return F.cross_entropy(logits, ids[0, start:stop]).item()

    table = nll_by_window(model, ids, slice(25, 36), (1, 8, 25, 100))
    assert list(table.seen) == [1, 8, 25, 25]
    assert list(table.tokens) == [11] * 4
    expected = [loss_of(25, 36, window) for window in (1, 8, 25, 100)]
    assert list(table.nll) == pytest.approx(expected, rel=1e-5)
    assert len({round(value, 4) for value in expected}) == 3
    (nll,) = nll_by_window(model, ids, slice(35, None), (4,)).nll
    assert nll == pytest.approx(loss_of(35, 40, 4), rel=1e-5)
    for start, stop, window in ((0, 5, 4), (5, 5, 4), (5, 99, 4), (5, 9, 0)):
        with pytest.raises(ValueError, match="is no passage of 40 tokens"):
            nll_by_window(model, ids, slice(start, stop), (4, window))


def test_a_passage_returns_after_the_distance_that_was_asked_for():
    passage, text = source_text("heapq"), source_text("textwrap")
    tokenizer = load_tokenizer(fetch(["gpt2"])[0])
    repeat = with_repeat(tokenizer, text, passage, distance=120, length=48, lead=8)
    assert torch.equal(repeat.ids[:, repeat.first], repeat.ids[:, repeat.target])
    assert (repeat.ids.shape, repeat.distance) == ((1, 8 + 120 + 48), 120)
    assert (repeat.first.start, repeat.target.stop) == (8, 176)
    assert passage.startswith(tokenizer.decode(repeat.ids[0, repeat.first]))
    for of, distance, said in (
        ("x" * 99, 10, "must be at least"),
        (text[500:900], 60, "holds the"),
    ):
        with pytest.raises(ValueError, match=said):
            with_repeat(tokenizer, text, of, distance=distance, length=20)


# --- recall ---------------------------------------------------------------------------------------

LENGTH = 1024


@pytest.fixture(scope="module")
def model():
    return load_recall("cpu")


def share(scores, solver, window, kinds=None, column="accuracy"):
    """Over all questions of these kinds."""
    rows = scores[(scores["solver"] == solver) & (scores["window"] == window)]
    if kinds is not None:
        rows = rows[rows["kind"].isin(kinds)]
    return (rows[column] * rows["n"]).sum() / rows["n"].sum()


def test_it_finds_the_facts_that_it_sees_in_unseen_texts_and_simpler_rules_do_not(model):
    documents, windows = unseen_documents(LENGTH, count=1, seed=700), [64, LENGTH // 2, LENGTH]
    scores = accuracy_by_window(model, documents, windows)
    for kinds in (["locker"], ["code", "place", "who", "when"]):
        assert share(scores, "model", LENGTH, kinds) >= 0.85
    assert share(scores, "model", 64) < 0.3
    visible = [share(scores, "model", window, column="visible") for window in windows]
    assert visible[0] < 0.2 < visible[1] < 0.8 < visible[2] == 1
    assert abs(share(scores, "model", LENGTH // 2) - visible[1]) < 0.2
    assert [share(scores, "pattern", window) for window in windows] == pytest.approx(visible)
    for solver in ("last value", "guess"):
        assert 0 < share(scores, solver, LENGTH) < 0.4


def test_answers_count_only_if_all_of_their_bytes_are_the_model_s_own_choice(model):
    document = records(400, seed=3)
    bytes_, right = ByteTokenizer(), 0
    for question in document.questions:
        ids = bytes_.encode(document.text + question.prompt)
        for _ in question.answer:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        right += bytes_.decode(ids[-len(question.answer) :]) == question.answer
    scores = accuracy_by_window(model, [document], [400])
    assert share(scores, "model", 400) == pytest.approx(right / len(document.questions))


def test_what_cannot_be_scored_is_refused(model):
    asks = records(400, seed=0, facts=3, questions=3, ask="throughout")
    for document, window, said in ((asks, 64, "apart"), (records(400, seed=0), 0, "above 0")):
        with pytest.raises(ValueError, match=said):
            accuracy_by_window(model, [document], [window])


def test_labels_are_the_questions_with_their_answers():
    stream = recall_batches(
        [Stage(1, 192, 2, 3, 8), Stage(1, 640, 1, 8, 24, dialogues=1)], others=0
    )
    assert [tuple(stream(step)[0]["tokens"].shape) for step in (1, 2)] == [(1, 640)] * 2
    assert not torch.equal(stream(1)[0]["tokens"], stream(2)[0]["tokens"])
    (batch,) = stream(0)
    document = records(192, seed=FIRST_SEED, facts=3, questions=8, ask="throughout")
    labels = batch["labels"][0].tolist()
    for question, (start, end) in zip(document.questions, document.answers, strict=True):
        assert bytes(labels[start - 1 : end - 1]).decode() == question.answer
    asked = sum(len(q.prompt) - len("? ") + len(q.answer) for q in document.questions)
    assert sum(label != -100 for label in labels) == asked


def test_the_first_steps_lower_the_loss():
    stages = (Stage(8, 192, 1, facts=3, questions=8),)
    round_ = Round(stages, learning_rate=3e-3, warmup_steps=2)
    _, (history,) = train_recall([round_])
    assert sum(history.losses[-2:]) < 0.85 * sum(history.losses[:2])


def test_the_file_is_small_and_loads_as_it_was_saved_without_drawing_numbers(model, tmp_path):
    assert (data_dir() / "models" / "recall.safetensors").stat().st_size <= 2_000_000
    path, state = save_recall(model, tmp_path / "copy"), torch.get_rng_state()
    loaded = load_recall("cpu", path=path)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, saved in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, saved.float())
    assert not model.training


# --- positions ------------------------------------------------------------------------------------


def test_a_part_of_a_text_is_scored_as_the_model_scores_it_and_plain_frequencies_change_nothing():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=50, width=32, layers=2, heads=2)).eval()
    text = torch.randint(50, (2, 41), generator=torch.Generator().manual_seed(1))
    inputs, labels = text[:, :-1], text[:, 1:].clone()
    labels[:, :10] = IGNORED
    found = nll_by_position(model, inputs, labels, bucket=16)
    assert found.window.tolist() == [16, 32, 40]
    assert found.labels.tolist() == [12, 32, 16]
    with torch.no_grad():
        assert (found.nll * found.labels).sum() / 60 == pytest.approx(model(inputs, labels).item())

    plain = 10_000.0 ** -(torch.arange(8) / 8)
    same = nll_by_position(with_frequencies(model, plain), inputs, labels, bucket=16)
    assert same.nll.tolist() == pytest.approx(found.nll.tolist(), rel=1e-5)
    slower = nll_by_position(with_frequencies(model, plain / 2), inputs, labels, bucket=16)
    assert slower.nll.tolist() != pytest.approx(found.nll.tolist(), rel=1e-5)
    q = torch.randn(1, 7, 2, 16)
    (before, after), at = (model, with_frequencies(model, plain, 1.5)), torch.arange(7)
    assert torch.allclose(after.turn(at)(q), 1.5 * before.turn(at)(q), atol=1e-5)


def test_passages_windows_and_seeds_count_from_the_beginning():
    llama = tiny("llama")
    ids = torch.arange(12)[None]
    for target in (slice(-4, None), slice(4, -2), slice(4, 10, 2), slice(0, 4), slice(4, 13)):
        with pytest.raises(ValueError, match="no passage of 12 tokens"):
            nll_by_window(llama, ids, target, [4])
    with pytest.raises(ValueError, match="one text"):
        nll_by_window(llama, ids.expand(2, -1), slice(4, 8), [4])
    whole, part = (nll_by_window(llama, ids, slice(4, stop), [4]) for stop in (12, None))
    assert whole.equals(part)
    for options in ({"count": 0}, {"seed": 999_999, "count": 2}):
        with pytest.raises(ValueError, match="seeds below a million"):
            unseen_documents(600, **options)
    stage = Stage(1, 600, 1, 2, 2)
    for wrong in (lambda: recall_batches([]), lambda: recall_batches([stage], others=2)):
        with pytest.raises(ValueError, match="at least 1"):
            wrong()
    with pytest.raises(ValueError, match="count from 0"):
        recall_batches([stage])(-1)


def test_frequencies_and_a_past_belong_to_their_model():
    rotary, two = (Decoder(DecoderConfig(11, 16, layers, 2)).eval() for layers in (1, 2))
    learned = Decoder(DecoderConfig(11, 16, 1, 2, positions="learned"))
    for model, pairs in ((rotary, 1), (rotary, 8), (learned, 4)):
        with pytest.raises(ValueError, match="frequencies"):
            with_frequencies(model, torch.ones(pairs))
    tokens = torch.arange(8)[None]
    _, past = read_on(rotary, tokens)
    torch.testing.assert_close(
        read_on(rotary, tokens[:, 4:], read_on(rotary, tokens[:, :4])[1])[0],
        rotary.hidden(tokens)[:, 4:],
    )
    for model, before in (
        (learned, None),
        (two, past),
        (rotary, [(k[:0], v[:0]) for k, v in past]),
    ):
        with pytest.raises(ValueError, match="rotary positions, as many rows"):
            read_on(model, tokens, before)
    for labels, bucket in ((tokens, 0), (tokens, -1), (tokens[:, 1:], 4)):
        with pytest.raises(ValueError, match="of one shape"):
            nll_by_position(rotary, tokens, labels, bucket=bucket)
