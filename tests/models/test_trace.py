"""Counts of what ran, where it ran; no matrix of N x N was made."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from transformers import DynamicCache

from labsupport.attention import flash_torch
from labsupport.models.generation.generate import attention_lines
from labsupport.models.integration import attention_used, reset_attention_used, set_attention, trace
from labsupport.profiling import largest_tensor
from tests.models.tiny import padding, tiny, tokens


def lines(model) -> list[tuple]:
    return [(use.layer, use.backend, use.io_aware, use.calls) for use in attention_used(model)]


def test_each_layer_is_counted_until_the_counts_begin_again():
    model = tiny("llama")
    set_attention(model, "standard")
    assert str(attention_used(model)) == "labsupport's attention has not run in this model"
    for _ in range(3):
        model(tokens(1, 4))
    assert lines(model) == [(0, "standard", False, 3), (1, "standard", False, 3)]
    assert attention_used(model)[0].module == "model.layers.0.self_attn"
    header, row = str(attention_used(model)).splitlines()
    assert header == "layers  backend   stored        calls each  kernel"
    assert row.startswith("   0-1  standard  N x N tensor           3  labsupport.attention.")
    set_attention(model, "flash_torch")
    assert lines(model) == []
    model(tokens(1, 4))
    assert lines(model) == [(0, "flash_torch", True, 1), (1, "flash_torch", True, 1)]
    reset_attention_used(model)
    assert lines(model) == []


def test_two_models_do_not_mix_a_copy_starts_at_zero_and_none_is_kept_alive():
    one, two = tiny("llama"), tiny("llama")
    set_attention(one, "standard")
    set_attention(two, "flash_torch")
    one(tokens(1, 4))
    two(tokens(1, 4))
    two(tokens(1, 4))
    assert [use.calls for use in attention_used(one)] == [1, 1]
    assert [use.calls for use in attention_used(two)] == [2, 2]
    assert lines(copy.deepcopy(two)) == []
    pickle.dumps(two)
    gone = weakref.ref(two.model.layers[0].self_attn)
    del two
    gc.collect()
    assert gone() is None


# --- the log --------------------------------------------------------------------------------------


def test_the_log_says_once_for_each_layer_what_it_uses(caplog, capfd):
    model = tiny("llama")
    set_attention(model, "flash")
    model(tokens(1, 4))
    assert trace.log.getEffectiveLevel() > logging.INFO
    assert capfd.readouterr().err == ""  # nothing is printed unasked
    caplog.set_level(logging.INFO, "labsupport.models")
    set_attention(model, "flash_torch")
    for _ in range(3):
        model(tokens(1, 4))
    set_attention(model, "standard")
    model(tokens(1, 4))
    assert [record.getMessage() for record in caplog.records] == [
        "Using FlashAttention for layer 0 (flash_torch)",
        "Using FlashAttention for layer 1 (flash_torch)",
        "Using standard attention for layer 0 (standard)",
        "Using standard attention for layer 1 (standard)",
    ]


def test_another_kernel_of_the_same_backend_is_counted_and_not_said_again(caplog):
    caplog.set_level(logging.INFO, "labsupport.models")
    layer = tiny("llama").model.layers[1].self_attn
    for kernel in ("forward", "forward for one query"):
        trace.note(layer, "flash_triton", kernel, True)
    assert len(caplog.records) == 1
    assert [use.kernel for use in attention_used(layer)] == ["forward", "forward for one query"]


def test_a_fused_kernel_with_a_stored_mask_is_not_called_flash(caplog):
    """On a CPU, PyTorch's flash kernel stores the mask of a chunk of a prompt."""
    model = tiny("llama", num_hidden_layers=1)
    caplog.set_level(logging.INFO, "labsupport.models")
    set_attention(model, "sdpa_flash")
    past = DynamicCache(config=model.config)
    for length in (4, 3, 1, 1):
        model(tokens(1, length), past_key_values=past)
    assert lines(model) == [(0, "sdpa_flash", True, 3), (0, "sdpa_flash", False, 1)]
    kinds = ["FlashAttention", "a fused kernel with a stored mask"]
    assert [record.getMessage() for record in caplog.records] == [
        f"Using {kind} for layer 0 (sdpa_flash)" for kind in kinds
    ]
    reported = [line.partition(" (")[0] for line in attention_lines(attention_used(model))]
    assert reported == kinds


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "backend", "side"),
    [
        ("gpt2", "flash_torch", "left"),
        ("llama", "sdpa_flash", "lengths"),
        ("llama", "flash_torch", "none"),
        ("mistral", "flash_torch", "none"),  # its window, too
        ("bert", "sdpa_flash", "left"),
    ],
)
def test_no_tensor_of_n_by_n_is_made_padded_or_not(monkeypatch, family, backend, side):
    # Tiles that are small beside a short sequence's N x N.
    monkeypatch.setattr(flash_torch, "LARGEST_BLOCKS", {"cpu": (64, 64)})
    length = 500
    model, ids, mask = tiny(family), tokens(2, length), padding(2, length, side)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stored = largest_tensor(lambda: model(ids, attention_mask=mask))
        set_attention(model, backend)
        made = largest_tensor(lambda: model(ids, attention_mask=mask))
    assert stored.numel >= 2 * 4 * length * length
    assert made.numel < length * length
    assert all(use.io_aware for use in attention_used(model))
    if family == "llama":
        labels = {"attention_mask": mask, "labels": ids}
        made = largest_tensor(lambda: model(ids, **labels).loss.backward())
        assert made.numel < length * length
