"""A whole model, measured: the table, and the FLOPs that it is judged by."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labsupport.models.flops import model_flops
from labsupport.models.integration import register_attention
from labsupport.models.measure import measure_model
from labsupport.profiling import speedup
from tests.models.tiny import tiny, tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_are_what_pytorch_counts_but_for_the_hidden_half_of_attention(family):
    model = tiny(family)
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


def measured(model, attentions, **options):
    lengths = options.pop("lengths", [16])
    fast = {"max_seconds": 0.05, "progress": False, "lengths": lengths}
    return measure_model(model, tokens(1, lengths[-1]), attentions=attentions, **fast, **options)


def test_attention_is_exchanged_and_nothing_else():
    def nothing(module, query, key, value, attention_mask, **kwargs):
        return query.transpose(1, 2).clone()

    name = register_attention("does_nothing", nothing)
    table = measured(tiny("llama"), ["eager", "flash", name], lengths=[16, 32])
    assert list(table.backend) == ["eager", "flash", name] * 2
    assert table.kernel[0] == "Transformers' eager"
    assert "flash" in table.kernel[1]
    assert "nothing" in table.kernel[2]
    for _, (eager, flash, without) in table.groupby("seqlen").loss:
        assert eager == pytest.approx(flash, abs=1e-5)
        assert abs(eager - without) > 1e-3
    ratios = speedup(table, over="eager")
    assert (ratios[ratios.backend == "eager"].speedup == 1).all()
    assert table.attrs["provenance"]["model"] == "llama"


def test_training_is_measured_with_its_gradients_and_leaves_none_behind():
    model = tiny("llama").train()
    step = measured(model, ["flash"], direction="forward+backward")
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert step.peak_memory_bytes.item() > gradients
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_a_backend_refuses_is_a_row_and_a_text_that_is_too_short_an_error():
    row = measured(tiny("llama").to(torch.float64), ["flash_triton"])
    assert row.status.item() == "unsupported"
    assert "float64" in row.reason.item()
    with pytest.raises(ValueError, match=r"\(1, 8\); \(batch, 16 or more\)"):
        measure_model(tiny("llama"), tokens(1, 8), lengths=[16], progress=False)
