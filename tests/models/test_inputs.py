"""Prompts, positions, logits and counts: the right tokens, or an error of the lab."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.models import compare_attention, negative_log_likelihood
from labsupport.models.flops import model_flops
from labsupport.models.generation.generate import prefill_and_decode
from labsupport.models.generation.prompts import Batch, Sampler, batch_of, check_logits
from labsupport.models.measure import measure_model
from tests.models.tiny import tiny

quickly = settings(max_examples=40, deadline=None, database=None, derandomize=True)
LLAMA = tiny("llama")
VOCABULARY, POSITIONS = LLAMA.config.vocab_size, LLAMA.config.max_position_embeddings
token = st.integers(0, VOCABULARY - 1)
rows = st.lists(st.lists(token, max_size=5), max_size=3)
odd = st.lists(st.lists(st.integers(-2, VOCABULARY) | st.just(0.5), max_size=3), max_size=2)


@torch.no_grad()
def one_by_one(row, count):
    """The greedy tokens of a row alone, without cache or padding."""
    ids = torch.tensor([row])
    for _ in range(count):
        ids = torch.cat([ids, LLAMA(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(row) :].tolist()


@quickly
@given(rows | odd, st.integers(-1, 4) | st.just(POSITIONS), st.sampled_from(["dynamic", "static"]))
def test_a_batch_gets_each_rows_own_tokens_or_is_refused(prompts, count, cache):
    try:
        done = prefill_and_decode(LLAMA, batch_of(prompts, "cpu"), count, cache=cache)
    except ValueError as error:
        assert str(error)  # noqa: PT017
        sound = prompts and all(prompts) and 0 <= count < POSITIONS
        known = all(token in range(VOCABULARY) for row in prompts for token in row)
        assert not (sound and known)
        return
    assert done.tokens == [one_by_one(row, count) for row in prompts]


@quickly
@given(st.lists(st.integers(-1, 7), max_size=3), st.integers(0, 3), st.integers(0, 6))
def test_lengths_belong_to_their_rows(lengths, batch, width):
    ids = torch.zeros(batch, width, dtype=torch.int64)
    if batch != len(lengths) or not batch or not all(1 <= n <= width for n in lengths):
        with pytest.raises(ValueError, match="lengths"):
            Batch(ids, tuple(lengths))
        return
    made = Batch(ids, tuple(lengths))
    assert made.positions.amax(1).tolist() == [n - 1 for n in lengths]
    assert made.mask(width) is None or made.mask(width).sum(1).tolist() == lengths


@quickly
@given(
    st.floats(1e-45, 1e38) | st.sampled_from([0.0, -1.0, math.nan, math.inf]),
    st.none() | st.integers(-1, 5),
    st.lists(st.floats(-1e4, 1e4, width=16) | st.just(-math.inf), min_size=3, max_size=3),
)
def test_a_token_without_probability_is_never_drawn(temperature, top_k, logits):
    if not 0 <= temperature < math.inf or (top_k is not None and (top_k < 1 or not temperature)):
        with pytest.raises(ValueError, match=r"temperature|top_k"):
            Sampler(torch.device("cpu"), temperature, top_k)
        return
    given = torch.tensor([logits] * 20)
    if max(logits) == -math.inf:
        with pytest.raises(ValueError, match="NaN or infinite"):
            check_logits(given)
        return
    drawn = Sampler(torch.device("cpu"), temperature, top_k)(given)
    exact = (given[0].double() - max(logits)) / max(temperature, 1e-300)
    possible = {i for i, below in enumerate(exact.tolist()) if below > -200}
    assert set(drawn.tolist()) <= possible


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_no_text(value):
    broken = tiny("llama")
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = value
    with pytest.raises(ValueError, match="PrecisionTracker"):
        prefill_and_decode(broken, batch_of([[1, 2]], "cpu"), 2)


@quickly
@given(st.lists(st.integers(0, 4), max_size=3), st.integers(-1, 8), st.booleans())
def test_a_likelihood_is_the_mean_of_the_text_or_refused(shape, chunk, floating):
    ids = torch.arange(math.prod(shape)).reshape(shape) % VOCABULARY
    ids = ids.float() if floating else ids
    if floating or len(shape) != 2 or shape[0] < 1 or shape[1] < 2 or chunk < 1:
        with pytest.raises(ValueError, match=r"ids|chunk_size"):
            negative_log_likelihood(LLAMA, ids, chunk=chunk)
        return
    logits = LLAMA(ids, use_cache=False).logits[:, :-1].double()
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert negative_log_likelihood(LLAMA, ids, chunk=chunk) == pytest.approx(expected, rel=1e-5)


def test_measurements_of_nothing_are_refused():
    ids = torch.zeros(1, 8, dtype=torch.int64)
    for options in ({"lengths": (-4,)}, {"lengths": ()}, {"lengths": (9,)}, {"lengths": (1,)}):
        with pytest.raises(ValueError, match="lengths"):
            measure_model(LLAMA, ids, progress=False, **options)
    with pytest.raises(ValueError, match="unknown direction 'forwards'"):
        measure_model(LLAMA, ids, lengths=(8,), direction="forwards", progress=False)
    for numbers in ((-1, 8), (1, -8)):
        with pytest.raises(ValueError, match="at least 0"):
            model_flops(LLAMA, *numbers)
    with pytest.raises(ValueError, match="no more logits"):
        model_flops(LLAMA, 1, 8, logits=9)
    model = tiny("llama").train()
    negative_log_likelihood(model, ids)  # it has no dropout
    model.model.layers[0].self_attn.attention_dropout = 0.1
    for options in ({"repeats": 0}, {"prompt": ["a", "b"]}):
        with pytest.raises(ValueError, match="one text and at least 1 repeat"):
            compare_attention(LLAMA, None, **({"prompt": "a"} | options))
    with pytest.raises(ValueError, match="and whole"):
        prefill_and_decode(LLAMA, batch_of([[1]], "cpu"), 1.5)
    with pytest.raises(ValueError, match="training mode"):
        negative_log_likelihood(model, ids)
