"""The small model that finds facts again: what it can do, how it begins, and its file."""

import pytest
import torch

from benchmarks.recall import Round, save_recall, train_recall
from labsupport.paths import data_dir
from labsupport.training import ByteTokenizer, records
from labsupport.training.data import FIRST_SEED
from labsupport.training.tasks.recall import (
    Stage,
    load_recall,
    recall_batches,
    unseen_documents,
)
from labsupport.training.tasks.recall_scores import (
    accuracy_by_window,
    evidence_head,
    read_on,
)

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


def test_a_head_looks_at_the_evidence_of_other_texts_than_those_it_was_chosen_on(model):
    first, others = (unseen_documents(LENGTH, count=1, seed=s) for s in (710, 720))
    head = evidence_head(model, first, others)
    assert head["found"] > 0.5 > 10 * head["chance"]
    assert head["n"] == sum(len(document.questions) for document in others)


def test_reading_on_gives_what_reading_at_once_gives(model):
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (1, 40), generator=generator)
    rows = torch.randint(0, 256, (3, 9), generator=generator)
    _, _, past = read_on(model, text)
    hidden, _, _ = read_on(model, rows, past)
    with torch.no_grad():
        at_once = model.hidden(torch.cat([text.expand(3, -1), rows], 1))[:, 40:]
    torch.testing.assert_close(hidden, at_once, atol=1e-4, rtol=1e-4)


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
