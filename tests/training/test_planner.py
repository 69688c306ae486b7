"""The planner: predicted memory beside a real step's, measured to the byte."""

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
from labsupport.training.planner.__main__ import main
from labsupport.training.planner.formulas import Step

GPT2 = DecoderConfig(vocab_size=257, width=128, layers=3, heads=4)
LLAMA = DecoderConfig(
    vocab_size=257, width=128, layers=3, heads=4, kv_heads=2, norm="rms", mlp="swiglu",
    mlp_width=320, bias=False, tied=False,
)  # fmt: skip
NARROW_GPT2 = DecoderConfig(vocab_size=50_257, width=32, layers=2, heads=2)
LEARNED = DecoderConfig(
    vocab_size=257, width=128, layers=3, heads=4, positions="learned", tied=False
)
SHALLOW = DecoderConfig(vocab_size=257, width=128, layers=1, heads=4)
BF16 = torch.bfloat16
ALL = MemoryOptions(attention="sdpa_flash", checkpoint=True, mlp_chunk=256, loss_chunk=256)
HALF_STREAM = MemoryOptions(
    attention="sdpa_flash", checkpoint=True, mlp_chunk=256, loss_chunk=256, residual=BF16
)

# What varies: family, grouped heads, tied, vocabulary; attention and each saving; length, batch;
# autocast; the optimizer; accumulation.
GRID: dict[str, tuple[DecoderConfig, dict[str, Any]]] = {
    "textbook": (GPT2, {"seqlen": 512, "savings": MemoryOptions("standard")}),
    "textbook, checkpointed, batch": (
        LLAMA,
        {"seqlen": 256, "batch": 2, "savings": MemoryOptions("standard", checkpoint=True)},
    ),
    "textbook, bfloat16": (
        LLAMA,
        {"seqlen": 512, "savings": MemoryOptions("standard"), "autocast": BF16},
    ),
    "all logits": (GPT2, {"seqlen": 1024, "savings": MemoryOptions("sdpa_flash")}),
    "all logits, bfloat16, batch": (
        LEARNED,
        {"seqlen": 256, "batch": 2, "savings": MemoryOptions("sdpa_flash"), "autocast": BF16},
    ),
    "a large vocabulary, loss in chunks": (
        NARROW_GPT2,
        {"seqlen": 1024, "savings": MemoryOptions(loss_chunk=128), "autocast": BF16},
    ),
    "checkpointed": (
        GPT2,
        {"seqlen": 1024, "savings": MemoryOptions(checkpoint=True, loss_chunk=128)},
    ),
    "checkpointed, bfloat16": (
        LLAMA,
        {"seqlen": 1024, "savings": MemoryOptions(checkpoint=True), "autocast": BF16},
    ),
    "MLP in chunks": (
        GPT2,
        {"seqlen": 1024, "savings": MemoryOptions(mlp_chunk=256, loss_chunk=256)},
    ),
    "everything, bfloat16": (SHALLOW, {"seqlen": 4096, "savings": ALL, "autocast": BF16}),
    "everything, bfloat16 stream": (
        LLAMA,
        {"seqlen": 1024, "savings": HALF_STREAM, "autocast": BF16},
    ),
    "the lab's own flash, checkpointed": (
        LLAMA,
        {"seqlen": 512, "savings": MemoryOptions("flash_torch", checkpoint=True), "autocast": BF16},
    ),
    "float16": (
        GPT2,
        {"seqlen": 256, "savings": MemoryOptions("sdpa_flash"), "autocast": torch.float16},
    ),
    "micro-batches": (GPT2, {"seqlen": 256, "accumulation": 2, "savings": ALL}),
    "AdamW all together": (
        NARROW_GPT2,
        {"seqlen": 16, "optimizer": "foreach", "savings": MemoryOptions(loss_chunk=16)},
    ),
    "AdamW tensor by tensor": (
        NARROW_GPT2,
        {"seqlen": 16, "savings": MemoryOptions(loss_chunk=16)},
    ),
    "no optimizer": (
        LLAMA,
        {"seqlen": 256, "optimizer": None, "savings": MemoryOptions(checkpoint=True)},
    ),
}


@pytest.mark.parametrize("case", GRID)
def test_a_real_step_takes_what_was_predicted_within_a_tenth(case):
    config, options = GRID[case]
    predicted = plan_memory(config, **options)
    measured = measure_step(config, **options).peak_bytes
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.1), predicted


@pytest.mark.parametrize(
    ("config", "attention", "autocast"),
    [
        (GPT2, "standard", None),
        (GPT2, "sdpa_flash", BF16),
        (LLAMA, "standard", BF16),
        (LLAMA, "sdpa_flash", None),
        (LLAMA, "flash_torch", BF16),
    ],
)
def test_what_blocks_keep_is_known_within_a_hundredth(config, attention, autocast):
    savings = MemoryOptions(attention)
    step = Step(config, savings, 384, 1, autocast, "cpu", None, 1, blocks=config.layers)
    model, tokens = Decoder(config, savings), torch.zeros(1, 384, dtype=torch.long)

    def forward():
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return model.hidden(tokens)

    copies = config.layers * step.symbols["Wb"] * 2 if autocast else 0
    angles = 384 * config.head_dim * 4
    predicted = sum(part.bytes for part in step.kept_until_loss()) + copies + angles
    kept = measure_peak_memory(forward, device="cpu").kept_bytes
    assert kept == pytest.approx(predicted, rel=0.01)


def test_gpt2_keeps_16_widths_a_token_and_block_and_its_statistics():
    step = Step(DecoderConfig(), MemoryOptions(), 1000, 1, None, "cpu", None, 1, blocks=1)
    statistics = 1000 * (2 * 8 + 12 * 4)  # two norms' mean and deviation; a log-sum-exp a head
    assert sum(p.bytes for p in step.kept_by_blocks()) == 1000 * 16 * 768 * 4 + statistics
    plan = plan_memory(GPT2, seqlen=1000, savings=MemoryOptions("standard"))
    assert plan.parts["attention's scores (P)"].bytes == 3 * 1000**2 * (4 * 4 + 1)


def test_a_formula_says_what_its_bytes_are():
    plan = plan_memory(DecoderConfig(), seqlen=1024, savings=MemoryOptions())
    assert plan.when == "loss, backward"
    assert plan.parts["logits and their loss"].formula == "3·T·V·4"
    assert plan.parts["logits and their loss"].bytes == 3 * 1024 * 50_257 * 4
    assert plan.parts["weights"].bytes == 4 * 123_653_376
    assert plan.parts["AdamW's states"].bytes == 8 * 123_653_376
    text = str(plan_memory(DecoderConfig(), seqlen=16_384, device="cuda", limit="16GiB"))
    assert text.startswith("peak ")
    assert "does not fit 16.0 GiB" in text
    assert "3·T·V·4" in text


def test_the_peak_is_the_sum_of_its_parts_and_the_largest_phase():
    plan = plan_memory(LLAMA, seqlen=512, savings=ALL)
    frame = plan.frame()
    totals = frame.groupby("moment")["bytes"].sum()
    assert totals.idxmax() == plan.when
    assert totals.max() == plan.peak_bytes == sum(p.bytes for p in plan.parts.values())
    assert set(frame.loc[frame.peak, "part"]) == set(plan.parts)
    assert plan.step_bytes == plan.peak_bytes - 12 * LLAMA.parameters


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
    assert length > 0
    assert length % 256 == 0
    fits = [
        plan_memory(DecoderConfig(), seqlen=seqlen, limit="4GiB", **options).fits
        for seqlen in (length, length + 256)
    ]
    assert fits == [True, False]
    assert longest(DecoderConfig(), "1GiB") == 0  # not even the weights
    assert longest(LEARNED, "64GiB") == 1024


def test_each_remedy_lengthens_the_sequence_or_leaves_it():
    table = what_fits(DecoderConfig(), "16GiB", device="cuda", seqlen=8192)
    assert list(table.remedy) == [strategy.name for strategy in STRATEGIES]
    assert table.longest.is_monotonic_increasing
    assert table.peak_bytes.is_monotonic_decreasing
    assert table.fits.tolist() == (table.longest >= 8192).tolist()
    assert table.fits.iloc[[0, -1]].tolist() == [False, True]


def test_textbook_attention_grows_with_the_square_of_the_length():
    def peak(seqlen, attention):
        savings = MemoryOptions(attention, loss_chunk=1024)
        return plan_memory(GPT2, seqlen=seqlen, savings=savings, optimizer=None).peak_bytes

    assert peak(65_536, "standard") / peak(32_768, "standard") == pytest.approx(4, rel=0.05)
    assert peak(65_536, "sdpa_flash") / peak(32_768, "sdpa_flash") == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seqlen": 0}, "seqlen=0"),
        ({"batch": 0}, "batch=0"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"device": "mps"}, "device='mps'"),
        ({"savings": MemoryOptions("sdpa_math")}, "plan with 'standard'"),
        ({"seqlen": 1025}, "has learned 1024 positions"),
    ],
)
def test_what_cannot_be_planned_is_refused(wrong, said):
    options: dict[str, Any] = {"seqlen": 8} | wrong
    with pytest.raises(ValueError, match=said):
        plan_memory(LEARNED, **options)


def test_the_command_prints_the_plan_or_the_remedies(capsys):
    main(["--preset", "tiny", "--lengths", "64", "--device", "cpu", "--loss-chunk", "32"])
    printed = capsys.readouterr().out
    assert "3·T·V·4" not in printed
    assert "W·4" in printed
    main(["--preset", "gpt2-small", "--device", "cuda", "--ladder", "16GiB", "--lengths", "8192"])
    assert "+ checkpointing" in capsys.readouterr().out
