"""A whole model, measured: the table, and the FLOPs that it is judged by."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labsupport.models.flops import model_flops
from labsupport.models.integration.register import register_attention
from labsupport.models.measure import measure_model
from labsupport.plotting import plot_memory
from labsupport.profiling import speedup
from tests.models.tiny import tiny, tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_are_what_pytorch_counts_but_for_the_hidden_half_of_attention(family):
    model = tiny(family)
    model.set_attn_implementation("eager")
    config, (batch, seqlen) = model.config, (2, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(batch, seqlen), use_cache=False)
    hidden_half = 2 * batch * config.num_hidden_layers * seqlen**2 * config.hidden_size
    counted = counter.get_total_flops() - hidden_half
    # Rotary angles are a product as well, of a few numbers.
    assert counted == pytest.approx(model_flops(model, batch, seqlen), rel=0.01)


def test_fewer_logits_take_fewer_flops_and_a_backward_pass_more():
    model = tiny("llama")
    config = model.config
    every, last = model_flops(model, 1, 10), model_flops(model, 1, 10, logits=1)
    assert every - last == 2 * 9 * config.hidden_size * config.vocab_size
    attention = 2 * config.num_hidden_layers * 10**2 * config.hidden_size
    both = model_flops(model, 1, 10, backward=True)
    assert both == 3 * (every - attention) + 3.5 * attention


@pytest.fixture(scope="module")
def table():
    return measure_model(
        tiny("llama"), tokens(1, 32), attentions=["eager", "flash"], lengths=[16, 32],
        max_seconds=0.05, progress=False,
    )  # fmt: skip


def test_attention_is_exchanged_and_nothing_else(table):
    assert list(table.backend) == ["eager", "flash"] * 2
    assert list(table.kernel[:1]) == ["Transformers' eager"]
    assert "flash" in table.kernel[1]
    for _, pair in table.groupby("seqlen"):
        assert pair.loss.max() - pair.loss.min() < 1e-5


def test_the_table_goes_into_ratios_and_charts(table):
    ratios = speedup(table, over="eager")
    assert (ratios[ratios.backend == "eager"].speedup == 1).all()
    assert "eager" in plot_memory(table, title="A model")._repr_mimebundle_()["text/plain"]
    assert table.attrs["provenance"]["model"] == "llama"


def test_training_is_measured_with_its_gradients_and_leaves_none_behind():
    model = tiny("llama").train()
    step = measure_model(
        model, tokens(1, 16), attentions=["flash"], lengths=[16],
        direction="forward+backward", max_seconds=0.05, progress=False,
    )  # fmt: skip
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert step.peak_memory_bytes.item() > gradients
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_of_ones_own_is_measured_by_its_name():
    def nothing(module, query, key, value, attention_mask, **kwargs):
        return query.transpose(1, 2).clone()

    register_attention("does_nothing", nothing)
    row = measure_model(
        tiny("llama"), tokens(1, 16), attentions=["does_nothing"], lengths=[16],
        max_seconds=0.05, progress=False,
    )  # fmt: skip
    assert "nothing" in row.kernel.item()


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=r"\(1, 8\); \(batch, 16 or more\)"):
        measure_model(tiny("llama"), tokens(1, 8), lengths=[16], progress=False)


def test_what_a_backend_refuses_is_a_row_with_its_reason():
    row = measure_model(
        tiny("llama").to(torch.float64), tokens(1, 16), attentions=["flash_triton"],
        lengths=[16], progress=False,
    )  # fmt: skip
    assert row.status.item() == "unsupported"
    assert "float64" in row.reason.item()
