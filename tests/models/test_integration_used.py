"""What ran is counted where it ran, and no matrix of N x N was made."""

import copy
import gc
import logging
import pickle
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache

from labsupport.attention import flash_torch
from labsupport.models.generation.result import attention_lines
from labsupport.models.integration import used
from labsupport.models.integration.select import set_attention
from labsupport.models.integration.used import attention_used, reset_attention_used
from labsupport.profiling import largest_tensor
from tests.models.tiny import padding, tiny, tokens


def lines(model) -> list[tuple]:
    return [(use.layer, use.backend, use.io_aware, use.calls) for use in attention_used(model)]


def test_each_layer_is_counted():
    model = tiny("llama")
    set_attention(model, "flash_torch")
    for _ in range(3):
        model(tokens(1, 4))
    assert lines(model) == [(0, "flash_torch", True, 3), (1, "flash_torch", True, 3)]
    first = attention_used(model)[0]
    assert first.module == "model.layers.0.self_attn"
    assert first.kernel == "labsupport.attention.flash_torch.FlashAttentionFunction"


def test_the_record_prints_as_aligned_lines():
    model = tiny("llama")
    set_attention(model, "standard")
    assert str(attention_used(model)) == "labsupport's attention has not run in this model"
    model(tokens(1, 4))
    assert str(attention_used(model)).splitlines() == [
        "layers  backend   stored        calls each  kernel",
        "   0-1  standard  N x N tensor           1  "
        "labsupport.attention.reference.banded_attention",
    ]


def test_two_models_do_not_mix_and_a_copy_starts_at_zero():
    one, two = tiny("llama"), tiny("llama")
    set_attention(one, "standard")
    set_attention(two, "flash_torch")
    one(tokens(1, 4))
    two(tokens(1, 4))
    two(tokens(1, 4))
    assert [use.calls for use in attention_used(one)] == [1, 1]
    assert [use.calls for use in attention_used(two)] == [2, 2]
    third = copy.deepcopy(two)
    assert lines(third) == []
    third(tokens(1, 4))
    assert lines(third) == [(0, "flash_torch", True, 1), (1, "flash_torch", True, 1)]
    pickle.dumps(two)


def test_the_counts_begin_again_with_set_attention_and_reset():
    model = tiny("llama")
    set_attention(model, "standard")
    model(tokens(1, 4))
    set_attention(model, "flash_torch")
    assert lines(model) == []
    model(tokens(1, 4))
    reset_attention_used(model)
    assert lines(model) == []


def test_the_record_keeps_no_model_alive():
    model = tiny("llama")
    set_attention(model, "standard")
    model(tokens(1, 4))
    gone = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert gone() is None


def test_calls_from_several_threads_are_all_counted():
    model = tiny("llama")
    set_attention(model, "standard")

    def work() -> None:
        for _ in range(25):
            model(tokens(1, 4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [use.calls for use in attention_used(model)] == [100, 100]


def test_a_call_that_is_not_io_aware_is_not_recorded_as_such():
    """On a CPU, PyTorch's flash kernel stores the mask of a chunk of a prompt."""
    model = tiny("llama")
    set_attention(model, "sdpa_flash")
    past = DynamicCache(config=model.config)
    for length in (4, 3, 1, 1):
        model(tokens(1, length), past_key_values=past)
    assert lines(model)[:2] == [(0, "sdpa_flash", True, 3), (0, "sdpa_flash", False, 1)]


# --- the log --------------------------------------------------------------------------------------


def test_the_log_says_once_for_each_layer_what_it_uses(caplog):
    model = tiny("llama")
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
        used.note(layer, "flash_triton", kernel, True)
    assert [record.getMessage() for record in caplog.records] == [
        "Using FlashAttention for layer 1 (flash_triton)"
    ]
    assert [use.kernel for use in attention_used(layer)] == ["forward", "forward for one query"]


def test_the_log_does_not_say_flashattention_of_a_stored_mask(caplog):
    model = tiny("llama", num_hidden_layers=1)
    caplog.set_level(logging.INFO, "labsupport.models")
    set_attention(model, "sdpa_flash")
    past = DynamicCache(config=model.config)
    for length in (4, 3):
        model(tokens(1, length), past_key_values=past)
    assert [record.getMessage() for record in caplog.records] == [
        "Using FlashAttention for layer 0 (sdpa_flash)",
        "Using a fused kernel with a stored mask for layer 0 (sdpa_flash)",
    ]


def test_a_report_says_what_the_log_says():
    model = tiny("llama", num_hidden_layers=1)
    set_attention(model, "sdpa_flash")
    past = DynamicCache(config=model.config)
    for length in (4, 3):
        model(tokens(1, length), past_key_values=past)
    said = [line.partition(" (")[0] for line in attention_lines(attention_used(model))]
    assert said == ["FlashAttention", "a fused kernel with a stored mask"]


def test_where_counts_begin_again_the_log_can_say_each_line_once(caplog):
    model = tiny("llama", num_hidden_layers=1)
    caplog.set_level(logging.INFO, "labsupport.models")

    def switch() -> None:
        for backend in ("standard", "flash_torch", "standard"):
            set_attention(model, backend)
            model(tokens(1, 4))

    with used.each_line_once():
        switch()
    assert len(caplog.records) == 2
    switch()
    assert len(caplog.records) == 2 + 3


def test_nothing_is_printed_unasked(capfd):
    model = tiny("llama")
    set_attention(model, "flash")
    model(tokens(1, 4))
    assert used.log.getEffectiveLevel() > logging.INFO
    assert capfd.readouterr().err == ""


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of flash_torch that are small beside a short sequence's N x N."""
    monkeypatch.setattr(flash_torch, "LARGEST_BLOCKS", {"cpu": (64, 64)})


@pytest.mark.parametrize("side", ["none", "left", "lengths"])
@pytest.mark.parametrize("backend", ["sdpa_flash", "flash_torch"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_no_tensor_of_n_by_n_is_made_padded_or_not(small_tiles, family, backend, side):
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


def test_training_makes_no_tensor_of_n_by_n_either(small_tiles):
    length = 500
    model, ids = tiny("llama"), tokens(2, length)
    set_attention(model, "flash_torch")
    made = largest_tensor(
        lambda: model(ids, attention_mask=padding(2, length, "left"), labels=ids).loss.backward()
    )
    assert made.numel < length * length


def test_a_sliding_window_makes_none_where_the_backend_knows_windows(small_tiles):
    length = 500
    model = tiny("mistral")
    set_attention(model, "flash_torch")
    with torch.no_grad():
        made = largest_tensor(lambda: model(tokens(1, length)))
    assert made.numel < length * length
