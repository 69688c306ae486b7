"""A text that is read once: continuations of it are what a whole pass would give."""

import pytest
import torch

from labsupport.models import set_attention
from labsupport.training.tasks.reading import Reading
from tests.models.tiny import tiny, tokens


@pytest.fixture(params=["standard", "flash"])
def model(request):
    model = tiny("llama")
    set_attention(model, request.param)
    return model


def whole(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits[0]


def test_questions_behind_a_text_get_the_logits_of_the_whole_each_time_anew(model):
    text, first, second = tokens(1, 20), tokens(1, 5, seed=1), tokens(1, 3, seed=2)
    reading = Reading(model, text)
    for question in (first, second, first):
        expected = whole(model, torch.cat([text, question], 1))
        n = question.shape[1]
        torch.testing.assert_close(reading.ask(question, keep=n), expected[-n:])
    torch.testing.assert_close(reading.last, whole(model, text)[-1])


def test_what_is_read_on_is_kept(model):
    text, more, question = tokens(1, 9), tokens(1, 4, seed=1), tokens(1, 2, seed=2)
    reading = Reading(model, text)
    together = torch.cat([text, more], 1)
    torch.testing.assert_close(reading.extend(more, keep=4), whole(model, together)[-4:])
    assert reading.length == 13
    expected = whole(model, torch.cat([together, question], 1))[-1:]
    torch.testing.assert_close(reading.ask(question), expected)


def test_tokens_left_out_cannot_be_seen_by_the_question_and_positions_stay(model):
    # Against the whole text with a mask in which only the rows of the question miss tokens 4 to 6.
    text, question = tokens(1, 12), tokens(1, 3, seed=1)
    reading = Reading(model, text)
    left_out = reading.ask(question, keep=3, without=(4, 7))
    ids = torch.cat([text, question], 1)
    allowed = torch.ones(15, 15, dtype=torch.bool).tril()
    allowed[12:, 4:7] = False
    model.set_attn_implementation("eager")
    scores = torch.zeros(15, 15).masked_fill(~allowed, -torch.inf)[None, None]
    expected = whole(model, ids, attention_mask=scores)[-3:]
    torch.testing.assert_close(left_out, expected)
    assert not torch.allclose(left_out, whole(model, ids)[-3:])


def test_attention_is_the_last_row_of_the_model_s_own_weights(model):
    text, question = tokens(1, 12), tokens(1, 3, seed=1)
    reading = Reading(model, text)
    chosen = model.config._attn_implementation
    weights = reading.attention(question)
    assert model.config._attn_implementation == chosen
    torch.testing.assert_close(reading.last, whole(model, text)[-1])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(torch.cat([text, question], 1), output_attentions=True).attentions
    torch.testing.assert_close(weights, torch.stack([layer[0, :, -1, :12] for layer in own]))


def test_a_question_of_one_token_can_be_watched_too(model):
    reading = Reading(model, tokens(1, 6))
    assert reading.attention(tokens(1, 1, seed=1)).shape == (2, 4, 6)


def test_a_batch_an_empty_text_and_a_model_in_training_are_refused():
    with pytest.raises(ValueError, match=r"must be \(1, N\)"):
        Reading(tiny("llama"), tokens(2, 5))
    with pytest.raises(ValueError, match=r"must be \(1, N\)"):
        Reading(tiny("llama"), tokens(1, 0))
    with pytest.raises(ValueError, match="training mode"):
        Reading(tiny("llama").train(), tokens(1, 5))
