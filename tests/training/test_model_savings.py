"""Savings lower the memory of a training step, and change its result by rounding only."""

from dataclasses import replace

import pytest
import torch

from labsupport.attention import available_backends
from labsupport.precision import FlashAttentionConfig, apply_precision_policy
from labsupport.profiling import measure_peak_memory
from labsupport.training.model import Decoder, DecoderConfig, Savings
from tests.training.decoders import (
    SMALL,
    assert_same_step,
    loss_and_gradients,
    model,
    of_each_shape,
    shifted,
)

SAVINGS = {
    "checkpoint": Savings(checkpoint=True),
    "mlp_chunk": Savings(mlp_chunk=7),
    "loss_chunk": Savings(loss_chunk=7),
    "residual": Savings(residual=torch.float32),
    "all": Savings("standard", True, 7, 7, torch.float32),
}


@of_each_shape
@pytest.mark.parametrize("saving", SAVINGS)
def test_a_saving_changes_loss_and_gradients_by_rounding_only(shape, saving):
    ids, labels = shifted(2, 24)
    labels = labels.clone()
    labels[1, 10:] = -100
    expected = loss_and_gradients(model(shape), ids, labels)
    got = loss_and_gradients(model(shape, SAVINGS[saving]), ids, labels)
    assert_same_step(got, expected)


@pytest.mark.parametrize("saving", SAVINGS)
def test_savings_hold_for_packed_documents_too(saving):
    ids, labels = shifted(1, 24)
    cu_seqlens = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
    expected = loss_and_gradients(model("llama"), ids, labels, cu_seqlens=cu_seqlens)
    other = model("llama", SAVINGS[saving])
    assert_same_step(loss_and_gradients(other, ids, labels, cu_seqlens=cu_seqlens), expected)


# Four query heads of 8 that share two key heads: what SHAPES ask of a backend, at most.
_PROBE = torch.zeros(1, 24, 4, 8), torch.zeros(1, 24, 2, 8), torch.zeros(1, 24, 2, 8)
for _each in _PROBE:
    _each.requires_grad_()
BACKENDS = [status.name for status in available_backends(*_PROBE, causal=True) if status.runs]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_that_runs_here_makes_the_same_step(backend):
    ids, labels = shifted(1, 24)
    expected = loss_and_gradients(model("llama", Savings("standard")), ids, labels)
    assert_same_step(loss_and_gradients(model("llama", Savings(backend)), ids, labels), expected)


def test_several_backends_run_here():
    assert {"standard", "sdpa_flash", "flash_torch"} <= set(BACKENDS)


def stream_dtypes(decoder, ids):
    """The dtypes of what enters each block."""
    seen = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        for block in decoder.blocks
    ]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = decoder.hidden(ids)
    for hook in hooks:
        hook.remove()
    return set(seen), hidden.dtype


@of_each_shape
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_stream_has_the_dtype_that_was_asked_for(shape, residual):
    ids, labels = shifted(2, 24)
    exact = model(shape)(ids, labels)
    for saving in (Savings(), Savings(checkpoint=True, mlp_chunk=7, loss_chunk=7)):
        decoder = model(shape, replace(saving, residual=residual))
        assert stream_dtypes(decoder, ids) == ({residual or torch.float32}, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = decoder(ids, labels)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(exact.item(), rel=0.02)
        assert all(p.grad.dtype == torch.float32 for p in decoder.parameters())
        decoder.zero_grad(set_to_none=True)


def test_checkpointing_keeps_the_stream_in_its_dtype():
    ids, labels = shifted(1, 512)
    kept = []
    decoder = model("gpt2 with rotary positions")
    for residual in (torch.float32, torch.bfloat16):
        decoder.savings = Savings(checkpoint=True, loss_chunk=32, residual=residual)
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(measure_peak_memory(lambda: decoder(ids, labels), device="cpu").kept_bytes)
    # Each of the two blocks keeps its input, (512, 32), with half as many bytes.
    assert kept[0] - kept[1] >= 2 * 512 * 32 * 2


def test_savings_lower_the_peak_of_a_training_step():
    torch.manual_seed(0)
    seqlen, vocabulary, width, layers = 512, 2048, 64, 4
    decoder = Decoder(DecoderConfig(vocabulary, width, layers, heads=2))
    ids = torch.randint(vocabulary, (1, seqlen))
    labels = ids.roll(-1, 1)

    def peak(**savings):
        decoder.savings = Savings(**savings)
        decoder.zero_grad(set_to_none=True)
        return measure_peak_memory(lambda: decoder(ids, labels).backward(), device="cpu").peak_bytes

    plain = peak()
    # The logits, and beside them their gradient.
    assert plain - peak(loss_chunk=128) >= 2 * seqlen * vocabulary * 4
    # In each MLP one tensor, four times as wide as the stream.
    assert plain - peak(mlp_chunk=128) >= layers * seqlen * 4 * width * 4
    assert peak(checkpoint=True, loss_chunk=128) <= peak(loss_chunk=128) / 2
    assert peak(checkpoint=True, mlp_chunk=128, loss_chunk=128) <= plain / 6


def test_savings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="mlp_chunk counts tokens"):
        Savings(mlp_chunk=0)
    with pytest.raises(ValueError, match="residual must be a floating dtype"):
        Savings(residual=torch.int8)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("loss_chunk", [None, 8])
def test_a_precision_policy_holds_in_every_part(norm, loss_chunk):
    config = replace(SMALL, norm=norm)
    policy = FlashAttentionConfig.float16(residual="float32", head="bfloat16", embedding="float32")
    model = Decoder(config, Savings(attention="flash_torch", loss_chunk=loss_chunk))
    report = apply_precision_policy(model, policy)
    assert "not recognised" not in str(report)
    seen = {}
    model.blocks[0].register_forward_pre_hook(lambda _, given: seen.update(stream=given[0].dtype))
    logits = model(torch.arange(12)[None])
    assert seen["stream"] == torch.float32
    assert logits.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float16
    loss = model(torch.arange(12)[None], torch.arange(1, 13)[None])
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None for p in model.parameters())
