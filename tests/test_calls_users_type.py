"""Calls and commands that users of other libraries and courses type, docs/coming-from.md.

Each text runs as it stands, with q, k and v in flash-attn's layout (batch, seqlen, heads,
head_dim), Q, K and V in the textbook's (batch, heads, seqlen, head_dim), and a small model.
"""

import os
import warnings

import pytest
import torch

from tests.commands.program import program
from tests.models.tiny import tiny, tokens

CALLS = {
    "flash-attn": """
from labsupport.attention import flash_attn_func, standard_attention
out = flash_attn_func(q, k, v, 0.0, None, True)  # dropout_p, softmax_scale, causal
torch.testing.assert_close(out.transpose(1, 2), standard_attention(Q, K, V, causal=True)[0])
out, lse, none = flash_attn_func(q, k, v, return_attn_probs=True)
assert lse.shape == (2, 4, 16) and none is None""",
    "flash-attn's kvcache": """
from labsupport.attention import flash_attn_with_kvcache
k_cache, v_cache = torch.zeros(2, 2, 32, 4, 8)
out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
assert torch.equal(k_cache[:, :16], k) and out.shape == q.shape""",
    "flash-attn's rotary": """
from labsupport.attention import apply_rotary_emb, rotary_angles
cos, sin = rotary_angles(torch.arange(16), 8)
assert apply_rotary_emb(q, cos, sin, False).shape == q.shape
later = apply_rotary_emb(q[:, 4:], cos, sin, interleaved=True, seqlen_offsets=4)
torch.testing.assert_close(later, apply_rotary_emb(q, cos, sin, interleaved=True)[:, 4:])""",
    "flash-attn's packed keys": """
from labsupport.attention import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
q, k, v = (x.flatten(0, 1) for x in (q, k, v))
cu = torch.tensor([0, 16, 32], dtype=torch.int32)
out = flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu, cu, 16, 16, causal=True)
torch.testing.assert_close(out, flash_attn_varlen_func(q, k, v, cu, cu, 16, 16, causal=True))""",
    "SDPA": """
from labsupport.attention import attention
out = attention(q, k, v, causal=True, backend="sdpa_flash")
expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=True)
torch.testing.assert_close(out.transpose(1, 2), expected)""",
    "a mask of booleans": """
from labsupport.attention import standard_attention
output, weights = standard_attention(Q, K, V, torch.ones(16, 16).tril().bool())
assert torch.equal(weights.triu(1), torch.zeros(2, 4, 16, 16))""",
    "a mask of integers": """
from labsupport.attention import AttentionInputError, standard_attention
with pytest.raises(AttentionInputError, match="bool"):
    standard_attention(Q, K, V, torch.ones(16, 16).tril().int())""",
    "the attention of a Transformers model": """
from labsupport.models import attention_used, set_attention
expected = model(ids).logits
set_attention(model, "flash")
torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
assert [layer.backend for layer in attention_used(model)] == ["sdpa_flash", "sdpa_flash"]""",
    "use_flash_attn changes nothing": """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, use_flash_attn=True))
assert "flash" not in model.config._attn_implementation""",
    "set_attention of another room": """
with pytest.raises(ImportError, match="set_attention: import it from labsupport.models"):
    from labsupport.attention import set_attention
with pytest.raises(ImportError, match="pad_input: docs/coming-from.md"):
    from labsupport.attention import pad_input, unpad_input""",
    "gradient checkpointing": """
from labsupport.models import set_attention
set_attention(model, "flash")
model.train().gradient_checkpointing_enable()
model(ids, labels=ids).loss.backward()
assert all(p.grad is not None for p in model.parameters())""",
    "weights of Transformers": """
from labsupport.training import from_transformers
torch.testing.assert_close(from_transformers(model)(ids), model(ids).logits, atol=1e-4, rtol=1e-4)
""",
    "a tracker": """
from labsupport.precision import PrecisionTracker
tracker = PrecisionTracker()
tracker.track_flash_attention_input(q, k.half(), v)
assert tracker.violations[0].kind == "mixed dtypes" and "mixed dtypes" in str(tracker.report())""",
    "an auto-fix": """
from labsupport.precision import auto_fix_precision_for_flash_attention, safe_flash_attention
assert {x.dtype for x in auto_fix_precision_for_flash_attention(q.half(), k, v)} == {torch.float32}
kwargs = {"causal": True}
assert safe_flash_attention(q.half(), k, v, **kwargs).dtype == torch.float16""",
    "a policy": """
from labsupport.precision import FlashAttentionConfig, apply_precision_policy
config = FlashAttentionConfig(attention=torch.float16, embedding=torch.float32)
apply_precision_policy(model, config)
assert model.transformer.wte.weight.dtype == torch.float32
assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16""",
    "mixed precision": """
from labsupport.precision import (
    FlashAttentionConfig, MixedPrecisionLayerNorm, MixedPrecisionOptimizer, compute_loss
)
norm = MixedPrecisionLayerNorm(8, dtype=torch.float16)
head = torch.nn.Linear(8, 5).bfloat16()
logits = head(norm(q[:, :, 0].half()).bfloat16())
loss = compute_loss(logits, torch.zeros(2, 16, dtype=torch.long))
optimizer = MixedPrecisionOptimizer(head, FlashAttentionConfig(), lr=1e-2)
optimizer.backward(loss)
assert loss.dtype == torch.float32 and optimizer.step()""",
    "CS336, PyTorch": """
from labsupport.attention import FlashAttentionFunction
x = torch.randn(3, 1, 8, 4, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(lambda q, k, v: FlashAttentionFunction.apply(q, k, v, True), (*x,))
""",
    "CS336, Triton": """
from labsupport.attention import FlashAttentionFunction, TritonFlashAttentionFunction
x = torch.randn(3, 2, 16, 16, requires_grad=True)
out = TritonFlashAttentionFunction.apply(*x, True)
torch.testing.assert_close(out, FlashAttentionFunction.apply(*x, True), atol=1e-3, rtol=1e-3)
out.sum().backward()
assert x.grad.isfinite().all()""",
    "rings": """
from labsupport.attention import flash_attn_func
from labsupport.distributed import (
    cleanup_ddp, ring_flash_attn_func, setup_ddp, shard_sequence, zigzag_ring_flash_attn_func
)
rank, world, local = setup_ddp()
try:
    assert local == 0
    q.requires_grad_()
    out = ring_flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True))
    out.sum().backward()
    own = [shard_sequence(x, rank, world, zigzag=True) for x in (q, k, v)]
    assert zigzag_ring_flash_attn_func(*own, causal=True).shape == q.shape
finally:
    cleanup_ddp()""",
    "DDP and FSDP": """
from labsupport.distributed import cleanup_ddp, setup_ddp, train_with_ddp, train_with_fsdp
from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches
info = setup_ddp()
try:
    assert (info.rank, info.world, info.device.type) == (0, 1, "cpu")
    stream, settings = batches([[1, 2, 3] * 20], 32, end_token=0), TrainConfig(steps=2)
    runs = []
    for train, options in ((train_with_ddp, {}), (train_with_fsdp, {"cpu_offload": True})):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(5, width=16, layers=1, heads=2))
        runs.append(train(model, stream, settings, progress=False, **options).history.losses)
    torch.testing.assert_close(*runs)
finally:
    cleanup_ddp()""",
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
    "a ring and its kernels": """
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
    for call in (lambda: train_with_ddp(rank, world_size), train_with_fsdp):
        with pytest.raises(TypeError, match="settings"):
            call()
finally:
    cleanup_ddp()""",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels named here are a CPU's")
@pytest.mark.parametrize("typed", CALLS.values(), ids=CALLS)
def test_a_call_as_users_type_it_does_what_they_expect(typed):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 16, 4, 8)
    names = {"Q": q.transpose(1, 2), "K": k.transpose(1, 2), "V": v.transpose(1, 2)}
    names |= {"torch": torch, "pytest": pytest, "q": q, "k": k, "v": v}
    model = tiny("gpt2", attn_pdrop=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(typed, names | {"model": model, "ids": tokens(2, 12)})


COMMANDS = {
    "the benchmark's flags": (
        "bench --batch 1 --seqlen 16 --nheads 1 --headdim 8 --causal --dtype fp32 --repeats 3 "
        "--no-grad",
        ["min", "avg", "max", "peak", "average", "FLOP/s", "memory"],
    ),
    "the benchmark in 16 bits, as JSON": (
        "bench --batch 1 --seqlen 16 --nheads 1 --headdim 8 --causal --dtype fp16 --repeats 3 "
        "--no-grad --json -",
        ["median_ms", "average_tflops", "peak_memory_bytes"],
    ),
    "a folder of profiles": (
        "profile --batch 1 --seqlen 16 --nheads 1 --headdim 8 --no-grad --seconds 0.01 --out a/p",
        ["SUMMARY.md"],
    ),
    "all implementations, xFormers among them": (
        "compare --batch 1 --seqlen 16 --nheads 1 --headdim 8 --no-grad --repeats 2",
        ["xformers", "unsupported", "fastest: ", "leanest: "],
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's rows")
@pytest.mark.parametrize(("line", "shown"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_a_source_prints_what_it_promises(monkeypatch, tmp_path, line, shown):
    monkeypatch.chdir(tmp_path)
    names = ["standard", "sdpa_flash"]  # flex takes a C++ compiler long
    monkeypatch.setattr("labsupport.profiling.shapes.measurable_backends", lambda device: names)
    printed = program(*line.split()).output
    assert all(text in printed for text in shown), printed


def test_sizes_come_from_the_environment_too(monkeypatch):
    for name, value in {"BATCH": 1, "SEQLEN": 16, "NHEADS": 1}.items():
        monkeypatch.setitem(os.environ, f"LABSUPPORT_{name}", str(value))
    assert "batch 1, 16 tokens, 1 head" in program("bench", "--no-grad", "--repeats", "2").output
