"""Measured training steps, and losses of two attentions, side by side."""

import pandas as pd
import pytest

from labsupport.training import DecoderConfig, MemoryOptions
from labsupport.training.consistency import together
from labsupport.training.measure import measure_training
from labsupport.training.planner import MemoryStrategy

SHAPE = DecoderConfig(vocab_size=64, width=32, layers=2, heads=2)
TEXTBOOK = MemoryStrategy("textbook", MemoryOptions(attention="standard"))
FLASH = MemoryStrategy("flash", MemoryOptions(attention="sdpa_flash"))


def measured(lengths, strategies, **options):
    options = {"device": "cpu", "max_seconds": 0.01, "progress": False} | options
    return measure_training(SHAPE, lengths, strategies=strategies, **options)


@pytest.mark.slow
def test_each_remedy_and_length_is_a_row_and_changes_the_memory_and_not_the_loss():
    table = measured([128, 256], [TEXTBOOK, FLASH])
    assert table[["backend", "seqlen"]].values.tolist() == [
        ["textbook", 128], ["textbook", 256], ["flash", 128], ["flash", 256]
    ]  # fmt: skip
    assert (table.status == "ok").all()
    assert (table.median_ms > 0).all()
    seconds = table.median_ms / 1000
    assert table.tokens_per_s.to_numpy() == pytest.approx((table.seqlen / seconds).to_numpy())
    # Two products of N x N x width in each layer, forward and 2.5 times in the backward pass; half
    # of each is masked.
    flops = 3.5 * 2 * SHAPE.layers * table.seqlen**2 * SHAPE.width
    assert table.attention_tflops.to_numpy() == pytest.approx((flops / seconds / 1e12).to_numpy())
    assert table.kernel.str.contains("reference").tolist() == [True, True, False, False]
    assert table.kernel.str.contains("flash_attention").tolist() == [False, False, True, True]
    assert table.attrs["provenance"]["parameters"] == SHAPE.parameters
    wide = table.pivot_table(
        index="seqlen", columns="backend", values=["loss", "peak_memory_bytes"]
    )
    assert (wide.loss.textbook / wide.loss.flash - 1).abs().max() < 1e-5
    gap = wide.peak_memory_bytes.textbook - wide.peak_memory_bytes.flash
    # At least one N x N matrix of scores in each layer.
    assert gap[256] > SHAPE.layers * SHAPE.heads * 256**2 * 4


def test_what_does_not_fit_or_cannot_train_is_a_row_that_says_why():
    (row,) = measured([4096], [TEXTBOOK], limit="16 MiB").to_dict("records")
    assert row["status"] == "predicted"
    assert "16.0 MiB allowed" in row["reason"]
    assert "median_ms" not in row
    flex = MemoryStrategy("flex", MemoryOptions(attention="flex"))
    (row,) = measured([64], [flex]).to_dict("records")
    assert row["status"] == "unsupported"
    assert "flex" in row["reason"]


def test_the_first_losses_of_equal_seeds_are_compared():
    rows = [("a", 0, 0, 1.0), ("b", 0, 0, 1.5), ("a", 0, 30, 1.0), ("b", 0, 30, 9.0)]
    table = pd.DataFrame([*rows, ("a", 1, 0, 7.0)], columns=["backend", "seed", "step", "loss"])
    assert together(table, steps=20) == together(table, steps=30) == 0.5  # steps 0 to 29
    assert together(table, steps=40) == 8.0
    for part in (table.backend == "a", (table.backend == "b") | (table.seed == 1)):
        with pytest.raises(ValueError, match="two attentions"):
            together(table[part])
