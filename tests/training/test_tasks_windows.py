"""Likelihood by window, against the model's own loss; passages that return."""

import pytest
import torch
import torch.nn.functional as F

from labsupport.models import python_topics, source_text
from labsupport.training.tasks.windows import nll_by_window, with_repeat
from tests.models.conftest import smollm2, stories15m, stories_folder  # noqa: F401  fixtures
from tests.models.tiny import tiny, tokens


def loss_of(model, ids, start, stop, window):
    with torch.no_grad():
        first = max(0, start - window)
        logits = model(ids[:, first:stop], use_cache=False).logits[0, start - first - 1 : -1]
    return F.cross_entropy(logits, ids[0, start:stop]).item()


@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_a_window_is_what_is_seen_before_the_passage(chunk):
    model, ids = tiny("llama"), tokens(1, 40)
    table = nll_by_window(model, ids, slice(25, 36), (1, 8, 25, 100), chunk=chunk)
    assert list(table.seen) == [1, 8, 25, 25]
    assert list(table.tokens) == [11] * 4
    expected = [loss_of(model, ids, 25, 36, window) for window in (1, 8, 25, 100)]
    assert list(table.nll) == pytest.approx(expected, rel=1e-5)
    assert len({round(value, 4) for value in expected}) == 3


def test_a_passage_without_an_end_goes_to_the_end_of_the_text():
    model, ids = tiny("llama"), tokens(1, 20)
    (nll,) = nll_by_window(model, ids, slice(15, None), (4,)).nll
    assert nll == pytest.approx(loss_of(model, ids, 15, 20, 4), rel=1e-5)


@pytest.mark.parametrize("target", [slice(0, 5), slice(5, 5), slice(5, 99), slice(4, 9, 2)])
def test_what_is_no_passage_is_refused(target):
    with pytest.raises(ValueError, match="is no passage of 20 tokens"):
        nll_by_window(tiny("llama"), tokens(1, 20), target, (4,))


def test_windows_that_are_empty_or_beyond_the_positions_are_refused():
    model = tiny("llama", max_position_embeddings=16)
    nll_by_window(model, tokens(1, 30), slice(20, 26), (10,))
    with pytest.raises(ValueError, match="17 tokens, and the model has 16 positions"):
        nll_by_window(model, tokens(1, 30), slice(20, 26), (4, 11))
    with pytest.raises(ValueError, match="a window is 1 or more"):
        nll_by_window(model, tokens(1, 30), slice(20, 26), (0,))


def test_a_repeat_stands_twice_at_the_distance_asked_for(stories15m):  # noqa: F811
    repeat = with_repeat(
        stories15m.tokenizer,
        source_text("argparse"),
        python_topics()["try"],
        distance=60,
        length=20,
        lead=7,
    )
    first, again = repeat.ids[:, repeat.first], repeat.ids[:, repeat.target]
    assert torch.equal(first, again)
    assert first.shape == (1, 20)
    assert repeat.distance == 60
    assert repeat.ids.shape == (1, 87)
    assert (repeat.first.start, repeat.target.stop) == (7, 87)


def test_a_passage_that_returns_is_copied_once_the_window_reaches_it(smollm2):  # noqa: F811
    passage = source_text("heapq")
    repeat = with_repeat(
        smollm2.tokenizer,
        source_text("textwrap"),
        passage[passage.index("def merge(") :],
        distance=120,
        length=48,
        lead=8,
    )
    table = nll_by_window(smollm2.model, repeat.ids, repeat.target, (8, 72, 120))
    near, almost, reached = table.nll
    assert reached < 1.2 < 2 < almost < near + 0.3


def test_a_repeat_that_is_none_is_refused(stories15m):  # noqa: F811
    tokenizer, text = stories15m.tokenizer, source_text("argparse")
    with pytest.raises(ValueError, match="distance=10 must be at least length=20"):
        with_repeat(tokenizer, text, "x" * 99, distance=10, length=20)
    with pytest.raises(ValueError, match="the text holds the passage already"):
        with_repeat(tokenizer, text, text[500:900], distance=60, length=20)
