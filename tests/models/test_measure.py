"""A whole model, measured: the table, the FLOPs that it is judged by, the likelihood of a text."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labsupport.models.flops import model_flops
from labsupport.models.integration import register_attention
from labsupport.models.likelihood import negative_log_likelihood
from labsupport.models.measure import measure_model
from labsupport.profiling import largest_tensor, speedup
from tests.models.tiny import tiny, tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_are_what_pytorch_counts_but_for_the_hidden_half_of_attention(family):
    model = tiny(family)
    config, (batch, seqlen) = model.config, (2, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(batch, seqlen), use_cache=False)
    attention = 2 * batch * config.num_hidden_layers * seqlen**2 * config.hidden_size
    every = model_flops(model, batch, seqlen)
    # The counter takes both halves. Rotary angles are a product as well, of a few numbers.
    assert counter.get_total_flops() - attention == pytest.approx(every, rel=0.01)
    last = model_flops(model, batch, seqlen, logits=1)
    assert every - last == 2 * batch * (seqlen - 1) * config.hidden_size * config.vocab_size
    both = model_flops(model, batch, seqlen, backward=True)
    assert both == 3 * (every - attention) + 3.5 * attention


def measured(model, attentions, **options):
    lengths = options.pop("lengths", [16])
    fast = {"max_seconds": 0.05, "progress": False, "lengths": lengths}
    return measure_model(model, tokens(1, lengths[-1]), attentions=attentions, **fast, **options)


def test_attention_is_exchanged_and_nothing_else():
    def nothing(module, query, key, value, attention_mask, **kwargs):
        return query.transpose(1, 2).clone()

    name = register_attention("does_nothing", nothing)
    table = measured(tiny("llama"), ["eager", "flash", name])
    assert list(table.backend) == ["eager", "flash", name]
    assert table.kernel[0] == "Transformers' eager"
    assert "flash" in table.kernel[1]
    assert "nothing" in table.kernel[2]
    eager, flash, without = table.loss
    assert eager == pytest.approx(flash, abs=1e-5)
    assert abs(eager - without) > 1e-3
    ratios = speedup(table, over="eager")
    assert (ratios[ratios.backend == "eager"].speedup == 1).all()
    assert table.attrs["provenance"]["model"] == "llama"


def test_what_a_backend_refuses_is_a_row_and_a_text_that_is_too_short_an_error():
    row = measured(tiny("llama").to(torch.float64), ["flash_triton"])
    assert row.status.item() == "unsupported"
    assert "float64" in row.reason.item()
    with pytest.raises(ValueError, match=r"lengths \[16\].*\(1, 8\)"):
        measure_model(tiny("llama"), tokens(1, 8), lengths=[16], progress=False)


def test_training_is_measured_with_its_gradients_and_leaves_none_behind():
    model = tiny("llama").train()
    steps = measured(model, ["flash"], lengths=[8, 16], direction="forward+backward")
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert list(steps.seqlen) == [8, 16]
    assert (steps.peak_memory_bytes > gradients).all()
    assert all(parameter.grad is None for parameter in model.parameters())


# --- likelihood -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "chunk", "dtype", "rel"),
    [
        ("llama", 1, torch.float32, 1e-6),
        ("gpt2", 7, torch.float32, 1e-6),
        ("llama", 512, torch.bfloat16, 1e-3),
    ],
)
def test_it_is_the_model_s_own_loss_for_any_chunk_and_dtype(family, chunk, dtype, rel):
    model, ids = tiny(family, dtype=dtype), tokens(2, 40)
    with torch.no_grad():
        expected = pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=rel)
    assert negative_log_likelihood(model, ids, chunk=chunk) == expected


def test_not_more_than_a_chunk_of_logits_exists_at_a_time():
    model = tiny("llama", vocab_size=2000)
    largest = largest_tensor(lambda: negative_log_likelihood(model, tokens(1, 40), chunk=10))
    assert largest.nbytes == 10 * 2000 * 4


def test_ids_that_the_model_has_no_place_for_are_refused():
    gpt2 = tiny("gpt2", n_positions=16)
    negative_log_likelihood(gpt2, torch.arange(16)[None])
    for ids, message in (
        (torch.arange(17)[None], r"17 tokens of text .* 16 positions"),
        (torch.tensor([[3, 61]]), "a token 61, and the model's embedding has 61 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            negative_log_likelihood(gpt2, ids)
