"""The planner: predicted memory beside a real step's, measured to the byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from labsupport.profiling import measure_peak_memory
from labsupport.profiling.runs import load_run
from labsupport.training import Decoder, DecoderConfig, MemoryOptions
from labsupport.training.planner import (
    STRATEGIES,
    longest,
    measure_step,
    plan_memory,
    what_fits,
)
from labsupport.training.planner.formulas import StepMemory

GPT2 = DecoderConfig(vocab_size=257, width=128, layers=2, heads=4)
LLAMA = DecoderConfig(
    vocab_size=257, width=128, layers=2, heads=4, kv_heads=2, norm="rms", mlp="swiglu",
    mlp_width=320, bias=False, tied=False,
)  # fmt: skip
NARROW_GPT2 = DecoderConfig(vocab_size=50_257, width=32, layers=2, heads=2)
LEARNED = DecoderConfig(
    vocab_size=257, width=128, layers=2, heads=4, positions="learned", tied=False
)
SHALLOW = DecoderConfig(vocab_size=257, width=128, layers=1, heads=4)
BF16 = torch.bfloat16
ALL = MemoryOptions(attention="sdpa_flash", checkpoint=True, mlp_chunk=256, loss_chunk=256)

FLASH, CHECKPOINT = MemoryOptions("sdpa_flash"), MemoryOptions(checkpoint=True)
STANDARD_AGAIN = MemoryOptions("standard", checkpoint=True)

slow = pytest.mark.slow


# What varies: family, grouped heads, tied, vocabulary; attention and each saving; length, batch;
# autocast.
@pytest.mark.parametrize(
    ("config", "seqlen", "savings", "autocast", "more"),
    [
        (GPT2, 256, MemoryOptions("standard"), None, {}),
        pytest.param(LLAMA, 256, STANDARD_AGAIN, BF16, {"batch": 2}, marks=slow),
        (GPT2, 512, FLASH, None, {}),
        (LEARNED, 256, FLASH, BF16, {"batch": 2}),
        (NARROW_GPT2, 16, MemoryOptions(loss_chunk=16), None, {}),
        (GPT2, 512, MemoryOptions(checkpoint=True, loss_chunk=128), None, {}),
        (SHALLOW, 256, replace(ALL, mlp_chunk=64, loss_chunk=64, residual=BF16), BF16, {}),
        (SHALLOW, 512, replace(ALL, residual=BF16, head_chunk=1), BF16, {}),
        (GPT2, 1024, replace(ALL, mlp_chunk=512, head_chunk=2, offload=True), None, {}),
        (LLAMA, 256, CHECKPOINT, BF16, {}),
    ],
)
def test_a_real_step_takes_what_was_predicted_within_a_tenth(
    config, seqlen, savings, autocast, more
):
    options: dict[str, Any] = {"seqlen": seqlen, "savings": savings, "autocast": autocast, **more}
    predicted = plan_memory(config, **options)
    measured = measure_step(config, **options).peak_bytes
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.1), predicted


@pytest.mark.parametrize(
    ("config", "attention", "autocast"),
    [
        (GPT2, "standard", None),
        (LLAMA, "sdpa_flash", BF16),
    ],
)
def test_what_blocks_keep_is_known_within_a_hundredth(config, attention, autocast):
    savings = MemoryOptions(attention)
    step = StepMemory(config, savings, 128, 1, autocast, "cpu", blocks=config.layers)
    model, tokens = Decoder(config, savings), torch.zeros(1, 128, dtype=torch.long)

    def forward():
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return model.hidden(tokens)

    copies = config.layers * step.symbols["Wb"] * 2 if autocast else 0
    angles = 128 * config.head_dim * 4
    predicted = sum(part.bytes for part in step.kept_until_loss()) + copies + angles
    kept = measure_peak_memory(forward, device="cpu").kept_bytes
    assert kept == pytest.approx(predicted, rel=0.01)


def test_gpt2_keeps_16_widths_a_token_and_block_and_its_statistics():
    step = StepMemory(DecoderConfig(), MemoryOptions(), 1000, 1, None, "cpu", blocks=1)
    statistics = 1000 * (2 * 8 + 12 * 4)  # two norms' mean and deviation; a log-sum-exp a head
    assert sum(p.bytes for p in step.kept_by_blocks()) == 1000 * 16 * 768 * 4 + statistics
    plan = plan_memory(GPT2, seqlen=1000, savings=MemoryOptions("standard"))
    assert plan.parts["attention's scores (P)"].bytes == 2 * 1000**2 * (4 * 4 + 1)


def test_the_peak_is_the_sum_of_its_parts_and_a_formula_says_what_its_bytes_are():
    plan = plan_memory(DecoderConfig(), seqlen=1024, savings=MemoryOptions())
    assert plan.when == "loss, backward"
    assert plan.parts["logits and their loss"].formula == "3·T·V·4"
    assert plan.parts["logits and their loss"].bytes == 3 * 1024 * 50_257 * 4
    assert plan.parts["weights"].bytes == 4 * 123_653_376
    assert plan.parts["AdamW's states"].bytes == 8 * 123_653_376
    frame = plan.frame()
    totals = frame.groupby("moment")["bytes"].sum()
    assert totals.idxmax() == plan.when
    assert totals.max() == plan.peak_bytes == sum(p.bytes for p in plan.parts.values())
    assert set(frame.loc[frame.peak, "part"]) == set(plan.parts)
    text = str(plan_memory(DecoderConfig(), seqlen=16_128, device="cuda", limit="16GiB"))
    assert text.startswith("peak ")
    assert "does not fit 16.0 GiB" in text
    assert "3·T·V·4" in text


def test_plans_for_a_gpu_are_near_to_what_was_measured_on_one():
    recorded = load_run("planner-h200")  # bfloat16 autocast, no savings
    config = DecoderConfig.preset(recorded.attrs["provenance"]["preset"])
    for row in recorded.itertuples():
        plan = plan_memory(config, seqlen=int(row.seqlen), autocast=BF16, device="cuda")
        assert plan.peak_bytes == pytest.approx(row.measured_bytes, rel=0.02)


def test_the_longest_sequence_fits_and_the_next_does_not():
    savings = MemoryOptions(checkpoint=True, loss_chunk=1024)
    options: dict[str, Any] = {"savings": savings, "autocast": BF16, "device": "cuda"}
    length = longest(DecoderConfig(), "4GiB", **options)
    assert length % 256 == 0
    for seqlen, fits in ((length, True), (length + 256, False)):
        assert plan_memory(DecoderConfig(), seqlen=seqlen, limit="4GiB", **options).fits == fits
    assert longest(DecoderConfig(), "1GiB") == 0  # not even the weights
    assert longest(LEARNED, "64GiB") == 1024


def test_each_remedy_lengthens_the_sequence_or_leaves_it():
    table = what_fits(DecoderConfig(), "16GiB", device="cuda", seqlen=8192)
    assert list(table.remedy) == [strategy.name for strategy in STRATEGIES]
    assert table.longest.is_monotonic_increasing
    assert table.peak_bytes.is_monotonic_decreasing
    assert table.fits.tolist() == (table.longest >= 8192).tolist()
    assert table.fits.iloc[[0, -1]].tolist() == [False, True]


def test_what_cannot_be_planned_is_refused():
    wrong: dict[str, Any]
    for wrong, said in (
        ({"seqlen": 0}, "seqlen=0"),
        ({"device": "mps"}, "device='mps'"),
        ({"savings": MemoryOptions("sdpa_math")}, "plan with 'standard'"),
        ({"savings": MemoryOptions("flash_torch")}, "plan with 'standard'"),
        ({"seqlen": 1025}, "has learned 1024 positions"),
    ):
        with pytest.raises(ValueError, match=said):
            plan_memory(LEARNED, **{"seqlen": 8} | wrong)
