"""A passage is predicted from what stands in the window before it."""

import pytest
import torch
import torch.nn.functional as F

from labsupport.models import source_text
from labsupport.models.sources.build import fetch
from labsupport.models.sources.load import load_tokenizer
from labsupport.training.tasks.windows import nll_by_window, with_repeat
from tests.models.tiny import tiny, tokens


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
