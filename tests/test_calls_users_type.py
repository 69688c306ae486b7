"""Calls that users of other libraries and courses type; docs/coming-from.md lists them.

Each text runs as it stands, with q, k and v in flash-attn's layout (batch, seqlen, heads,
head_dim), Q, K and V in the textbook's (batch, heads, seqlen, head_dim), and a small model.
"""

import pytest
import torch

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
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels named here are a CPU's")
@pytest.mark.parametrize("typed", CALLS.values(), ids=CALLS)
def test_a_call_as_users_type_it_does_what_they_expect(typed):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 16, 4, 8)
    names = {"Q": q.transpose(1, 2), "K": k.transpose(1, 2), "V": v.transpose(1, 2)}
    names |= {"torch": torch, "pytest": pytest, "q": q, "k": k, "v": v}
    model = tiny("gpt2", attn_pdrop=0.0)
    exec(typed, names | {"model": model, "ids": tokens(2, 12)})
