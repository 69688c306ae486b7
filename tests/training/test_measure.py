"""Measured training steps: rows by remedy and length, the plan beside them, fitted exponents."""

import math

import pytest
import torch

from labsupport.training import DecoderConfig, MemoryOptions
from labsupport.training.measure import PLAIN, exponent, measure_training
from labsupport.training.planner import MemoryStrategy

SHAPE = DecoderConfig(vocab_size=64, width=32, layers=2, heads=2)
TEXTBOOK = MemoryStrategy("textbook", MemoryOptions(attention="standard"))
FLASH = MemoryStrategy("flash", MemoryOptions(attention="sdpa_flash"))


@pytest.fixture(scope="module")
def table():
    return measure_training(
        SHAPE,
        [256, 512],
        strategies=[TEXTBOOK, FLASH],
        device="cpu",
        max_seconds=0.01,
        progress=False,
    )


def test_each_remedy_and_length_is_a_row_with_time_memory_and_what_ran(table):
    assert table[["backend", "seqlen"]].values.tolist() == [
        ["textbook", 256], ["textbook", 512], ["flash", 256], ["flash", 512]
    ]  # fmt: skip
    assert (table.status == "ok").all()
    assert (table.median_ms > 0).all()
    kernels = table.set_index("backend").kernel
    assert all("reference" in kernel for kernel in kernels["textbook"])
    assert all("flash_attention" in kernel for kernel in kernels["flash"])
    assert table.attrs["provenance"]["parameters"] == SHAPE.parameters


def test_remedies_change_the_memory_and_not_the_loss(table):
    wide = table.pivot_table(
        index="seqlen", columns="backend", values=["loss", "peak_memory_bytes"]
    )
    assert (wide.loss.textbook / wide.loss.flash - 1).abs().max() < 1e-5
    gap = wide.peak_memory_bytes.textbook - wide.peak_memory_bytes.flash
    # At least one N x N matrix of scores in each layer.
    assert gap[512] > SHAPE.layers * SHAPE.heads * 512**2 * 4


def test_the_measured_peak_is_near_the_plan(table):
    assert (table.predicted_bytes / table.peak_memory_bytes - 1).abs().max() < 0.1


def test_what_the_plan_puts_far_above_the_limit_is_not_tried():
    (row,) = measure_training(
        SHAPE, [4096], strategies=[TEXTBOOK], device="cpu", limit="16 MiB", progress=False
    ).to_dict("records")
    assert row["status"] == "predicted"
    assert "16.0 MiB allowed" in row["reason"]
    assert "median_ms" not in row


def test_a_backend_that_cannot_train_is_a_row_that_says_why():
    strategy = MemoryStrategy("flex", MemoryOptions(attention="flex"))
    (row,) = measure_training(
        SHAPE, [64], strategies=[strategy], device="cpu", progress=False
    ).to_dict("records")
    assert row["status"] == "unsupported"
    assert "flex" in row["reason"]


def test_a_measurement_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    measure_training(SHAPE, [64], strategies=[FLASH], device="cpu", max_seconds=0, progress=False)
    assert torch.get_rng_state().equal(before)


def test_the_exponent_of_a_power_is_found():
    lengths = [256, 512, 1024, 4096]
    for power in (1.0, 1.7, 2.0):
        assert math.isclose(exponent(lengths, [3 * n**power for n in lengths]), power)
    for wrong in (([1], [1]), ([2, 2], [1, 2]), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="lengths"):
            exponent(*wrong)


def test_a_length_behind_the_learned_positions_is_a_row_beside_the_others():
    learned = DecoderConfig(
        vocab_size=64, width=32, layers=1, heads=2, positions="learned", max_positions=128
    )
    table = measure_training(
        learned, [128, 256], strategies=[FLASH], device="cpu", max_seconds=0, progress=False
    )
    assert table.status.tolist() == ["ok", "unsupported"]
    assert "128 positions" in table.reason[1]


def test_transformers_own_gpt2_is_measured_beside_and_needs_more():
    table = measure_training(
        SHAPE,
        [256],
        strategies=[FLASH, *PLAIN],
        device="cpu",
        max_seconds=0.01,
        progress=False,
    ).set_index("backend")
    assert (table.status == "ok").all()
    _, sdpa, checkpointed = (table.peak_memory_bytes[how.name] for how in PLAIN)
    assert sdpa > checkpointed > table.peak_memory_bytes[FLASH.name]
    assert table.predicted_bytes.isna().sum() == len(PLAIN)
