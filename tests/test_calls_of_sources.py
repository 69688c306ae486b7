"""Calls of the course's source documents by their exact names: each works, or says what differs."""

import os
import warnings

import pytest
import torch

from tests.commands.program import program
from tests.models.tiny import tiny

CALLS = {
    "a class of seven constants": """
from labsupport.precision import FlashAttentionConfig, apply_precision_policy
class Constants:
    ATTENTION_DTYPE = ATTENTION_WEIGHTS_DTYPE = MLP_WEIGHTS_DTYPE = torch.float16
    LAYERNORM_COMPUTE_DTYPE = LOSS_COMPUTE_DTYPE = OPTIMIZER_DTYPE = EMBEDDING_DTYPE = torch.float32
config = FlashAttentionConfig.from_constants(Constants)
assert config.mlp == config.MLP_WEIGHTS_DTYPE == torch.float16
assert config.norm_statistics == config.LAYERNORM_COMPUTE_DTYPE == torch.float32
apply_precision_policy(model, config)
assert model.transformer.h[0].mlp.c_fc.weight.dtype == torch.float16
assert model.transformer.wte.weight.dtype == torch.float32""",
    "violations as dicts": """
from labsupport.precision import PrecisionTracker
tracker = PrecisionTracker()
tracker.track_flash_attention_input(q, k.half(), v)
violation = tracker.violations[0]
assert violation["type"] == "flash_attention_mismatch"
assert violation["dtypes"] == (torch.float32, torch.float16, torch.float32)
assert violation["shapes"] == (q.shape, k.shape, v.shape)
assert "RuntimeError" in violation["message"] and violation["message"] == violation[2]
tracker.track_flash_attention_input(*[x.int() for x in (q, k, v)])
unsupported = [x for x in tracker.violations if x["type"] == "flash_attention_unsupported"]
assert unsupported[0]["dtype"] == torch.int32
assert "mixed dtypes" in str(tracker.report())""",
    "an auto-fix with float32 among them": """
from labsupport.precision import auto_fix_precision_for_flash_attention, safe_flash_attention
with pytest.warns(UserWarning, match="float16 -> float32"):  # a CPU's flash kernel takes float32
    fixed = auto_fix_precision_for_flash_attention(q, k.half(), v)
assert {x.dtype for x in fixed} == {torch.float32}
assert safe_flash_attention(q, k, v, causal=True).dtype == torch.float32""",
    "a loss with a scale": """
from labsupport.precision import compute_loss
logits, labels = torch.randn(2, 6, 10).half(), torch.zeros(2, 6, dtype=torch.long)
loss = compute_loss(logits, labels)
assert loss.dtype == torch.float32
torch.testing.assert_close(compute_loss(logits, labels, loss_scale=1024), 1024 * loss)""",
    "mixed precision's layer norm and optimizer": """
from labsupport.precision import (
    FlashAttentionConfig, MixedPrecisionLayerNorm, MixedPrecisionOptimizer
)
hidden, eps = 8, 1e-5
layer = torch.nn.Sequential(MixedPrecisionLayerNorm(hidden, eps), torch.nn.Linear(hidden, 1))
optimizer = MixedPrecisionOptimizer(layer, FlashAttentionConfig.float16(), init_scale=128.0)
optimizer.backward(layer(torch.randn(3, hidden)).sum())
assert optimizer.step()""",
    "textbook attention and its mask": """
from labsupport.attention import AttentionInputError, standard_attention
output, weights = standard_attention(Q, K, V, mask=None)
torch.testing.assert_close(output, weights @ V)
with pytest.raises(AttentionInputError, match=r"mask\\.bool\\(\\)"):
    standard_attention(Q, K, V, mask=torch.ones(16, 16).tril().int())""",
    "the tiled forward with one block size": """
from labsupport.attention import flash_attention_forward, online_softmax
out, lse = flash_attention_forward(Q, K, V, block_size=4)
torch.testing.assert_close(out, flash_attention_forward(Q, K, V)[0])
weights, lse = online_softmax(Q @ K.mT, block_size=5)
torch.testing.assert_close(weights, (Q @ K.mT).softmax(-1))""",
    "a config with use_flash_attn": """
from transformers import GPT2Config, GPT2LMHeadModel
from labsupport.models import set_attention
model = GPT2LMHeadModel(
    GPT2Config(n_layer=1, n_embd=16, n_head=2, attn_pdrop=0.0, use_flash_attn=True)
)
with pytest.warns(UserWarning, match="ignores use_flash_attn"):
    set_attention(model, "flash")""",
    "rings": """
from labsupport.distributed import (
    cleanup_ddp, ring_flash_attn_func, setup_ddp, triton_ring_flash_attn_func,
    zigzag_ring_flash_attn_func
)
setup_ddp()
try:
    options = {"causal": True, "deterministic": False, "return_attn_probs": True}
    out, lse, none = ring_flash_attn_func(q, k, v, **options)
    again, *_ = zigzag_ring_flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(again, out)
    small = [x[:1, :4, :1].repeat(1, 1, 1, 2) for x in (q, k, v)]
    torch.testing.assert_close(
        triton_ring_flash_attn_func(*small, causal=True), ring_flash_attn_func(*small, causal=True)
    )
finally:
    cleanup_ddp()""",
    "CS336's function": """
from labsupport.attention import FlashAttentionFunction
assert FlashAttentionFunction.apply(Q, K, V, True).shape == Q.shape""",
    "DDP by its names": """
from labsupport.distributed import benchmark_ddp, cleanup_ddp, setup_ddp, train_with_ddp
from labsupport.distributed import train_with_fsdp
from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches
rank, world_size, local_rank = setup_ddp()
try:
    small = DecoderConfig(5, width=16, layers=1, heads=2)
    stream = batches([[1, 2, 3] * 20], 32, end_token=0)
    settings = TrainConfig(steps=2, gradient_accumulation_steps=2)
    for train in (train_with_ddp, train_with_fsdp):
        assert len(train(Decoder(small), stream, settings, progress=False).history) == 2
    tokens = torch.zeros(2, 8, dtype=torch.long)
    dataloader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(tokens, tokens), batch_size=1
    )
    before = Decoder(small)
    rows = benchmark_ddp(before, dataloader, epochs=3)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(row["samples_per_s"] > 0 and row["all_reduce_bytes"] > 0 for row in rows)
    assert all(parameter.grad is None for parameter in before.parameters())
    with pytest.raises(ValueError, match="at least 1 epoch"):
        benchmark_ddp(before, dataloader, epochs=0)
finally:
    cleanup_ddp()""",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the dtypes named here are a CPU's")
@pytest.mark.parametrize("typed", CALLS.values(), ids=CALLS)
def test_a_call_of_a_source_works_or_says_what_differs(typed):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 16, 4, 8)
    names = {"Q": q.transpose(1, 2), "K": k.transpose(1, 2), "V": v.transpose(1, 2)}
    names |= {"torch": torch, "pytest": pytest, "q": q, "k": k, "v": v}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(typed, names | {"model": tiny("gpt2", attn_pdrop=0.0)})


COMMANDS = {
    "the benchmark's flags": (
        "bench --batch 1 --seqlen 16 --nheads 1 --headdim 8 --causal --dtype fp32 --repeats 3 "
        "--no-grad",
        ["min", "avg", "max", "peak", "average", "TFLOP/s", "memory"],
    ),
    "all implementations, xFormers among them": (
        "compare --batch 1 --seqlen 16 --nheads 1 --headdim 8 --no-grad --repeats 2",
        ["xformers", "unsupported", "fastest: ", "leanest: "],
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's rows")
@pytest.mark.parametrize(("line", "shown"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_a_source_prints_what_it_promises(monkeypatch, line, shown):
    names = ["standard", "sdpa_flash"]  # flex takes a C++ compiler long
    monkeypatch.setattr("labsupport.profiling.shapes.measurable_backends", lambda device: names)
    printed = program(*line.split()).output
    assert all(text in printed for text in shown), printed


def test_sizes_come_from_the_environment_too(monkeypatch):
    for name, value in {"BATCH": 1, "SEQLEN": 16, "NHEADS": 1}.items():
        monkeypatch.setitem(os.environ, f"LABSUPPORT_{name}", str(value))
    assert "batch 1, 16 tokens, 1 head" in program("bench", "--no-grad", "--repeats", "2").output
