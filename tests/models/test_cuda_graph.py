"""The fast loop: a step agrees with the model that it was written after, and so do its tokens."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from labsupport.models.generation import cuda_graph
from labsupport.models.generation.cuda_graph import GraphedDecoder
from labsupport.models.generation.generate import prefill_and_decode
from labsupport.models.generation.prompts import batch_of
from labsupport.models.generation.steps import rotate, step_of
from tests.models.tiny import ROWS, lively, tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 16}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("gpt2", {"n_inner": 40, "activation_function": "relu"}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_the_logits_of_a_step_and_the_tokens_are_those_of_the_model(family, options):
    model = lively(family, **options)
    ids = torch.tensor([[5, 9, 17, 3, 44, 21, 50, 2]])
    expected = model(ids).logits[0]
    step = step_of(model, 8)
    past = {}  # of each layer, keys and values grown by hand

    def attend(layer, q, k, v):
        new = torch.stack([k, v])[:, :, :, None]
        past[layer] = torch.cat([past[layer], new], 3) if layer in past else new
        out = F.scaled_dot_product_attention(q[:, :, None], *past[layer], enable_gqa=True)
        return out.flatten(1)

    with torch.no_grad():
        for position in range(ids.shape[1]):
            logits = step(ids[:, position], torch.tensor([position]), attend)
            torch.testing.assert_close(logits[0], expected[position], rtol=1e-4, atol=1e-4)
    batch = batch_of(ROWS, "cpu")
    decoder = GraphedDecoder(model, batch=3, length=46)
    assert decoder.run(batch, 40).tokens == prefill_and_decode(model, batch, 40).tokens


def watched(decoder):
    """The spans of a decoder's steps, as it runs."""
    spans, advance = [], decoder._run_step
    decoder._run_step = lambda span: (spans.append(span), advance(span))
    return spans


def test_the_cache_is_read_up_to_a_bound_that_grows(monkeypatch):
    monkeypatch.setattr(cuda_graph, "FIRST_SPAN", 4)
    model, batch = lively("llama"), batch_of(ROWS, "cpu")
    decoder = GraphedDecoder(model, batch=3, length=50)
    assert decoder.spans == [4, 8, 16, 32, 50]
    spans = watched(decoder)
    assert decoder.run(batch, 44).tokens == prefill_and_decode(model, batch, 44).tokens
    # The prompt fills 6 slots; the first step writes the seventh and sees seven.
    assert spans == [8] * 2 + [16] * 8 + [32] * 16 + [50] * 17


def test_a_decoder_is_used_again_and_remembers_nothing():
    model = lively("llama")
    decoder = GraphedDecoder(model, length=64)
    long, short = batch_of([ROWS[0] * 4], "cpu"), batch_of([[7, 8]], "cpu")
    decoder.run(long, 40)
    assert decoder.run(short, 20).tokens == prefill_and_decode(model, short, 20).tokens


def test_the_loop_notices_the_end_of_all_rows_within_a_few_steps(monkeypatch):
    monkeypatch.setattr(cuda_graph, "CHECK_EVERY", 4)
    model, batch = lively("llama"), batch_of(ROWS[:1], "cpu")
    free = prefill_and_decode(model, batch, 60).tokens[0]
    decoder = GraphedDecoder(model, length=66)
    steps = watched(decoder)
    done = decoder.run(batch, 60, ends=[free[5]])
    assert done.tokens == [free[: free.index(free[5]) + 1]]
    assert len(steps) <= free.index(free[5]) + 4


def test_rotation_keeps_lengths_and_depends_on_the_distance_only():
    angles = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    q, k = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (rotate(x, angles.cos(), angles.sin()) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(9))
    near = [turned_q[i + 2] @ turned_k[i] for i in range(7)]
    torch.testing.assert_close(torch.stack(near), near[0].expand(7))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mistral", {}, "no decode step for a MistralForCausalLM"),
        ("llama", {"attention_bias": True}, "attention_bias=False, but the model has True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='silu', but the model has 'gelu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=False"),
    ],
)
def test_a_model_that_no_step_is_written_for_is_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        GraphedDecoder(lively(family, **options), length=8)


def test_a_batch_that_a_decoder_was_not_made_for_is_refused():
    decoder = GraphedDecoder(lively("llama"), batch=2, length=10)
    with pytest.raises(ValueError, match=r"2 rows of 10 tokens, but 3 of 6 \+ 2 were given"):
        decoder.run(batch_of(ROWS, "cpu"), 2)
    with pytest.raises(ValueError, match=r"2 of 6 \+ 5 were given"):
        decoder.run(batch_of(ROWS[:2], "cpu"), 5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_compiles_as_one_graph_and_computes_the_same(family, monkeypatch):
    monkeypatch.setattr(cuda_graph, "FIRST_SPAN", 16)
    model, batch = tiny(family), batch_of(ROWS, "cpu")
    decoder = GraphedDecoder(model, batch=3, length=46, compile=True)
    assert decoder.how.startswith("compiled")
    assert decoder.run(batch, 40).tokens == prefill_and_decode(model, batch, 40).tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_on_a_gpu_a_replayed_graph_computes_the_same(family, compile, monkeypatch):
    monkeypatch.setattr(cuda_graph, "FIRST_SPAN", 16)
    model, batch = lively(family).cuda(), batch_of(ROWS, "cuda")
    decoder = GraphedDecoder(model, batch=3, length=46, compile=compile)
    assert len(decoder.graphs) == 3
    for _ in range(2):
        assert decoder.run(batch, 40).tokens == prefill_and_decode(model, batch, 40).tokens
