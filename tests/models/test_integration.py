"""Models with labsupport's attention compute what Transformers' own textbook path computes."""

import sys
from functools import cache
from typing import Any

import pytest
import torch
from transformers import BertLMHeadModel, CompileConfig, DynamicCache, StaticCache

from labsupport.attention import available_backends
from labsupport.models.integration import attention_used, reset_attention_used, set_attention
from tests.models.tiny import DECODERS, padding, tiny, tokens

# Those that compile or interpret take seconds a shape: they get one test of their own.
RUNS = [status.name for status in available_backends(device="cpu") if status.runs]
BACKENDS = [name for name in RUNS if name not in ("flex", "flash_triton")]
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
        past: Any = DynamicCache(config=model.config)
        if cache_kind == "static":
            past = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        parts, seen = [], 0
        for length in steps:
            new, seen = ids[:, seen : seen + length], seen + length
            valid = None if mask is None else mask[:, :seen]
            parts.append(model(new, attention_mask=valid, past_key_values=past).logits)
    return torch.cat(parts, dim=1)


@cache
def expected(family: str, side: str) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return run(tiny(family), side)


def error(logits: torch.Tensor, family: str, side: str) -> float:
    """The largest difference at valid positions; infinite if anything anywhere is not finite."""
    mask = padding(3, LENGTH, side)
    valid = torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    if not logits.isfinite().all():
        return float("inf")
    return float((logits - expected(family, side))[valid].abs().max())


def test_the_bound_is_far_below_what_a_wrong_mask_costs():
    for family in FAMILIES:
        assert error(run(tiny(family), "none"), family, "left") > 1000 * BOUND


@pytest.mark.parametrize("backend", [*BACKENDS, "flash", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_gives_the_logits_of_the_eager_path(family, backend):
    model = model_of(family)
    set_attention(model, backend)
    for side in [*SIDES, "empty"]:  # a row of nothing but padding harms no other
        assert error(run(model, side), family, side) < BOUND, side
    assert {use.layer for use in attention_used(model)} == {0, 1}
    if backend in BACKENDS:
        assert {use.backend for use in attention_used(model)} == {backend}


@pytest.mark.parametrize(("steps", "cache_kind"), [([4, 3, 2], "dynamic"), ([5, 1, 3], "static")])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", DECODERS)
def test_prefill_chunks_and_decode_give_the_same_as_one_forward(family, backend, steps, cache_kind):
    model = model_of(family)
    set_attention(model, backend)
    for side in ("none", "left", "lengths"):
        assert error(run(model, side, steps, cache_kind), family, side) < BOUND, side


def test_holes_in_the_padding_are_left_out_and_nothing_but_padding_is_no_call():
    model = model_of("llama")
    set_attention(model, "flash")
    assert error(run(model, "holes"), "llama", "holes") < BOUND
    reset_attention_used(model)
    nothing = torch.zeros(2, 4, dtype=torch.long)
    assert model(tokens(2, 4), attention_mask=nothing).logits.isfinite().all()
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


@pytest.mark.parametrize(
    ("family", "backend", "cache_kind"),
    [
        ("gpt2", "flash_torch", "dynamic"),
        ("llama", "sdpa_flash", "static"),
        ("mistral", "flash_torch", "static"),
        ("qwen2", "sdpa_flash", "dynamic"),
    ],
)
def test_a_left_padded_batch_generates_what_each_prompt_generates_alone(
    family, backend, cache_kind
):
    model = model_of(family)
    set_attention(model, backend)
    ids, mask = tokens(3, 8), padding(3, 8, "left")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    kind = {"cache_implementation": "static"} if cache_kind == "static" else {}
    together = model.generate(ids, attention_mask=mask, **options, **kind)[:, 8:]
    model.set_attn_implementation("eager")
    for row in range(3):
        alone = model.generate(ids[row : row + 1, 2 * row :], **options)
        assert together[row].tolist() == alone[0, 8 - 2 * row :].tolist()


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
@pytest.mark.parametrize("backend", ["flash_torch", "sdpa_flash"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert"])
def test_gradients_are_those_of_the_eager_path(family, backend, side):
    model = tiny(family)
    wanted = gradients(model, side)
    set_attention(model, backend)
    found = gradients(model, side)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * (1 + gradient.abs().max()), name


@pytest.mark.parametrize(("family", "reentrant"), [("gpt2", False), ("llama", True)])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model = tiny(family, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
    set_attention(model, "flash")
    wanted = gradients(model, "left")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, "left")
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_autocast_gives_the_accuracy_of_its_dtype(family):
    model = model_of(family)
    with torch.autocast("cpu", torch.bfloat16):
        model.set_attn_implementation("eager")
        theirs = error(run(model, "left"), family, "left")
        set_attention(model, "flash")
        found = error(run(model, "left"), family, "left")
    assert BOUND < found <= 2 * theirs


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

    seen, real = [], functions.attention

    def watched(q, k, v, **options):
        seen.append((tuple(q.shape), tuple(k.shape), k.untyped_storage().data_ptr()))
        return real(q, k, v, **options)

    monkeypatch.setattr(functions, "attention", watched)
    model = tiny("llama")
    set_attention(model, "auto")
    past: Any = StaticCache(config=model.config, max_cache_len=32)
    model(tokens(2, 7), past_key_values=past)
    memory = [layer.keys.untyped_storage().data_ptr() for layer in past.layers]
    # The cache itself, sliced.
    assert seen == [((2, 7, 4, 8), (2, 7, 2, 8), pointer) for pointer in memory]


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_sees_all_valid_keys_of_the_encoder(padded):
    config = tiny("bert").config
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
