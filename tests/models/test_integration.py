"""Models with labsupport's attention compute what Transformers' own textbook path computes."""

import sys
from functools import cache
from typing import Any

import pytest
import torch
from transformers import BertLMHeadModel, CompileConfig, DynamicCache, StaticCache

from labsupport.attention import available_backends
from labsupport.models.integration.select import set_attention
from labsupport.models.integration.used import attention_used, reset_attention_used
from tests.models.tiny import DECODERS, padding, tiny, tokens

# Those that compile or interpret take seconds a shape: they get one test of their own.
SLOW = {"flex", "flash_triton"}
RUNS = [status.name for status in available_backends(device="cpu") if status.runs]
BACKENDS = [name for name in RUNS if name not in SLOW]
FAMILIES = [*DECODERS, "bert"]
SIDES = ["none", "ones", "left", "right", "lengths"]
LENGTH = 9
# Float32 logits of size 1 behind two layers; a wrong mask changes them by 0.1 and more (below).
BOUND = 2e-5

model_of = cache(tiny)


def run(
    model: Any, side: str, steps: list[int] | None = None, cache_kind: str = "dynamic"
) -> torch.Tensor:
    """Logits (3, LENGTH, vocabulary), from one call, or from one call a step with a cache."""
    ids, mask = tokens(3, LENGTH), padding(3, LENGTH, side)
    with torch.no_grad():
        if steps is None:
            return model(ids, attention_mask=mask).logits
        config = model.config
        past: Any = DynamicCache(config=config)
        if cache_kind == "static":
            past = StaticCache(config=config, max_cache_len=LENGTH + 4)
        parts, seen = [], 0
        for length in steps:
            seen += length
            parts.append(
                model(
                    ids[:, seen - length : seen],
                    attention_mask=None if mask is None else mask[:, :seen],
                    past_key_values=past,
                ).logits
            )
    return torch.cat(parts, dim=1)


@cache
def expected(family: str, side: str) -> torch.Tensor:
    model = tiny(family)
    assert model.config._attn_implementation == "eager"
    with torch.autocast("cpu", enabled=False):  # whoever asks first
        return run(model, side)


def error(logits: torch.Tensor, family: str, side: str) -> float:
    """The largest difference at valid positions; infinite if anything anywhere is not finite."""
    mask = padding(3, LENGTH, side)
    valid = torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    if not logits.isfinite().all():
        return float("inf")
    return float((logits - expected(family, side))[valid].abs().max())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("backend", [*BACKENDS, "flash", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_gives_the_logits_of_the_eager_path(family, backend, side):
    model = model_of(family)
    set_attention(model, backend)
    assert error(run(model, side), family, side) < BOUND
    assert {use.layer for use in attention_used(model)} == {0, 1}
    if backend in BACKENDS:
        assert {use.backend for use in attention_used(model)} == {backend}


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right", "lengths"])
@pytest.mark.parametrize("steps", [[LENGTH], [4, 3, 2], [5, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", DECODERS)
def test_prefill_chunks_and_decode_give_the_same_as_one_forward(
    family, backend, steps, side, cache_kind
):
    model = model_of(family)
    set_attention(model, backend)
    assert error(run(model, side, steps, cache_kind), family, side) < BOUND


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_holes_in_the_padding_are_left_out(family):
    model = model_of(family)
    set_attention(model, "flash")
    assert error(run(model, "holes"), family, "holes") < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_nothing_but_padding_gives_finite_numbers_and_harms_no_other(family):
    model = model_of(family)
    for backend in BACKENDS:
        set_attention(model, backend)
        assert error(run(model, "empty"), family, "empty") < BOUND
    reset_attention_used(model)
    ids, nothing = tokens(2, 4), torch.zeros(2, 4, dtype=torch.long)
    assert model(ids, attention_mask=nothing).logits.isfinite().all()
    assert len(attention_used(model)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors are for the interpreter")
def test_the_triton_kernels_of_the_lab_run_in_a_model():
    model = model_of("llama")
    set_attention(model, "flash_triton")
    assert error(run(model, "left"), "llama", "left") < 1e-3  # its products are TF32's on a GPU


@pytest.mark.slow
@pytest.mark.skipif("flex" not in RUNS, reason="FlexAttention does not compile here")
def test_flex_attention_runs_without_padding():
    model = model_of("llama")
    set_attention(model, "flex")
    assert error(run(model, "none"), "llama", "none") < BOUND


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["flash_torch", "sdpa_flash"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_left_padded_batch_generates_what_each_prompt_generates_alone(
    family, backend, cache_kind
):
    model = model_of(family)
    set_attention(model, backend)
    ids, mask = tokens(3, 8), padding(3, 8, "left")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    if cache_kind == "static":
        options["cache_implementation"] = "static"
    together = model.generate(ids, attention_mask=mask, **options)[:, 8:]
    model.set_attn_implementation("eager")
    for row in range(3):
        alone = model.generate(ids[row : row + 1, 2 * row :], max_new_tokens=6, do_sample=False)
        assert together[row].tolist() == alone[0, 8 - 2 * row :].tolist()


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_generate_in_chunks_of_the_prompt_gives_the_same_text(family):
    model, ids = model_of(family), tokens(2, 11)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    model.set_attn_implementation("eager")
    whole = model.generate(ids, **options)
    set_attention(model, "flash")
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **options), whole)


# --- training -------------------------------------------------------------------------------------


def gradients(model: Any, side: str) -> dict[str, torch.Tensor]:
    ids, mask = tokens(3, LENGTH), padding(3, LENGTH, side)
    model.zero_grad(set_to_none=True)
    labels = ids
    if mask is not None:
        # The first token of a left-padded row is predicted from padding: no target either.
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        labels = ids.masked_fill((mask == 0) | (before == 0), -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("side", ["none", "lengths"])
@pytest.mark.parametrize("backend", ["flash_torch", "sdpa_flash", "standard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_eager_path(family, backend, side):
    model = tiny(family)
    wanted = gradients(model, side)
    set_attention(model, backend)
    found = gradients(model, side)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * (1 + gradient.abs().max()), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model = tiny(family, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
    set_attention(model, "flash")
    wanted = gradients(model, "left")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, "left")
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_gives_the_accuracy_of_its_dtype(family):
    model = model_of(family)
    with torch.autocast("cpu", torch.bfloat16):
        model.set_attn_implementation("eager")
        theirs = error(run(model, "left"), family, "left")
        set_attention(model, "flash")
        ours = error(run(model, "left"), family, "left")
    assert BOUND < ours <= 2 * theirs


def test_a_compiled_model_runs_around_the_attention():
    torch._dynamo.reset()
    model = tiny("llama")
    set_attention(model, "flash")
    compiled = torch.compile(model, backend="eager")
    assert error(run(compiled, "none"), "llama", "none") < BOUND


def test_generate_compiles_around_the_attention_with_a_static_cache():
    """As it does unasked on a GPU, where its cache is static."""
    torch._dynamo.reset()
    model, ids, mask = tiny("llama"), tokens(2, 6), padding(2, 6, "left")
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(ids, **options)
    set_attention(model, "flash")
    plain: dict[str, Any] = {"backend": "eager", "mode": None}
    compiled: Any = CompileConfig(**plain)
    compiled._compile_all_devices = True
    options |= {"cache_implementation": "static", "compile_config": compiled}
    assert torch.equal(model.generate(ids, **options), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_compiled_model_without_breaks_is_told_why_it_cannot_be():
    torch._dynamo.reset()
    model = tiny("llama")
    set_attention(model, "flash")
    with pytest.raises(Exception, match="Compile without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens(1, 4))


# --- options of models ----------------------------------------------------------------------------


def test_gpt2_scales_by_layer_where_its_config_says_so():
    plain = tiny("gpt2")
    model = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    wanted = run(model, "left")
    set_attention(model, "flash")
    valid = padding(3, LENGTH, "left") == 1
    assert (run(model, "left") - wanted)[valid].abs().max() < BOUND
    assert (run(plain, "left") - wanted)[valid].abs().max() > 1e-2


def test_heads_that_share_keys_go_in_without_copies(monkeypatch):
    from labsupport.models.integration import functions

    shapes = []
    real = functions.attention

    def watched(q, k, v, **options):
        shapes.append((tuple(q.shape), tuple(k.shape), k.untyped_storage().data_ptr()))
        return real(q, k, v, **options)

    monkeypatch.setattr(functions, "attention", watched)
    model = tiny("llama")
    set_attention(model, "auto")
    past: Any = StaticCache(config=model.config, max_cache_len=32)
    model(tokens(2, 7), past_key_values=past)
    assert [shape[:2] for shape in shapes] == [((2, 7, 4, 8), (2, 7, 2, 8))] * 2
    memory = [layer.keys.untyped_storage().data_ptr() for layer in past.layers]
    assert [shape[2] for shape in shapes] == memory  # the cache itself, sliced


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_sees_all_valid_keys_of_the_encoder(padded):
    model = tiny("bert")
    config = model.config
    config.is_decoder, config.add_cross_attention = True, True
    torch.manual_seed(0)
    decoder: Any = BertLMHeadModel(config).eval()
    states = torch.randn(2, 6, 32)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]) if padded else None

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return decoder(
                tokens(2, 6), encoder_hidden_states=states, encoder_attention_mask=mask
            ).logits

    wanted = logits()
    set_attention(decoder, "flash")
    assert (logits() - wanted).abs().max() < BOUND
    states[1, 5] += 100  # the padded key, if there is padding
    assert ((logits() - wanted).abs().max() < BOUND) == padded


def test_the_bound_is_far_below_what_a_wrong_mask_costs():
    for family in FAMILIES:
        assert error(run(tiny(family), "none"), family, "left") > 1000 * BOUND
