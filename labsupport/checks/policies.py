"""Exercise 2-5: a precision policy for inference, judged by what a model does under it.

The model is a small Llama that does what large ones do: its first token carries *massive
activations*, a few entries thousands of times as large as the others (M. Sun et al. 2024,
arXiv:2402.17762, section 2). Here two MLPs write them into the residual stream.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.attention.registry import short
from labsupport.checks.verdict import CheckFailed, call, passed
from labsupport.precision import FlashAttentionConfig, apply_precision_policy

Capability = tuple[int, int] | None

DEVICES: tuple[tuple[str, Capability, str], ...] = (
    ("cpu", None, "a CPU"),
    ("cuda", (7, 0), "a V100"),
    ("cuda", (7, 5), "a T4"),
    ("cuda", (8, 0), "an A100"),
    ("cuda", (8, 9), "an L4"),
    ("cuda", (9, 0), "an H100"),
    ("cuda", (10, 0), "a B200"),
    ("cuda", (12, 0), "an RTX 5090"),
)
COMPUTES = (
    *("attention", "attention_weights", "mlp", "norm_statistics", "norm_weights"),
    *("embedding", "residual", "head"),
)
LARGEST_SHARE, LARGEST_ERROR = 0.55, 0.02
STREAM, BRANCH = 40_000.0, 100_000.0  # what each of two MLPs adds, on old GPUs and on all others


def check_policy_devices(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-5: each device gets dtypes that its kernels and its arithmetic have."""
    for device, capability, name in DEVICES:
        policy = _policy(student, device, capability)
        where = f"my_policy({device!r}, {capability}), {name}: "
        low = [f for f in COMPUTES if getattr(policy, f) == torch.bfloat16]
        if low and not _has_bfloat16(capability):
            raise CheckFailed(
                f"{where}{low[0]} is bfloat16. The matrix units of GPUs before compute capability "
                "8.0 do not have it, and neither have the attention kernels for them."
            )
        flash_on_gpu = capability is not None and capability >= (8, 0)
        if flash_on_gpu and policy.attention not in (torch.float16, torch.bfloat16):
            raise CheckFailed(
                f"{where}attention is {short(policy.attention)}: FlashAttention's kernels for GPUs "
                "take float16 and bfloat16 only. (This is about q, k and v as they enter the "
                "kernel. It keeps scores and softmax in float32 by itself.)"
            )
        if policy.norm_statistics not in (torch.float32, torch.float64):
            raise CheckFailed(
                f"{where}norm_statistics is {short(policy.norm_statistics)}. A mean of squares "
                "belongs in float32: squares overflow float16 from 256 on, and bfloat16 keeps 8 "
                "bits of the sum. (Transformers' Llama squares in float32 by itself, but what it "
                "squares has this dtype.) It costs no memory worth mentioning."
            )
    passed("every device gets dtypes that it has", seed)


def check_policy_range(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-5: no NaN, and the logits of float32, although activations are massive.

    Raises:
        CheckFailed: the logits are not finite or too far from float32; says what overflowed.
    """
    for device, capability, name in DEVICES:
        policy = _policy(student, device, capability)
        size = BRANCH if _has_bfloat16(capability) else STREAM
        result = _measure(policy, size, seed)
        where = f"my_policy({device!r}, {capability}), {name}: "
        if result.not_finite:
            raise CheckFailed(f"{where}{_of_overflow(policy, size, seed)}")
        if not result.error <= LARGEST_ERROR:
            raise CheckFailed(
                f"{where}the logits differ from float32's by {result.error:.1%} (in norm); "
                f"{LARGEST_ERROR:.0%} are allowed."
            )
    passed(f"finite, and within {LARGEST_ERROR:.0%} of float32, with massive activations", seed)


def check_policy_memory(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-5: weights take half of float32's bytes, or little more.

    Raises:
        CheckFailed: they take more; says whose dtype is to blame.
    """
    for device, capability, name in DEVICES:
        policy = _policy(student, device, capability)
        result = _measure(policy, 0.0, seed)
        if result.share <= LARGEST_SHARE:
            continue
        parts = {
            "attention_weights": policy.attention_weights,
            "mlp": policy.mlp,
            "embedding": policy.embedding,
            "head": policy.head,
        }
        wide = [part for part, dtype in parts.items() if dtype.itemsize > 2]
        hint = " An optimizer's float32 copy is for training." if len(wide) == len(parts) else ""
        raise CheckFailed(
            f"my_policy({device!r}, {capability}), {name}: the weights take {result.share:.0%} of "
            f"what float32 takes; {LARGEST_SHARE:.0%} are allowed. 32 bits or more: "
            f"{', '.join(wide)}.{hint} What must not overflow are activations, such as `residual`: "
            "their dtype costs no weights."
        )
    passed(f"weights within {LARGEST_SHARE:.0%} of float32's bytes", seed)


@dataclass(frozen=True)
class _Measured:
    not_finite: int  # logits
    error: float  # ||logits - float32's|| / ||float32's||
    share: float  # bytes of the weights, relative to float32's


@lru_cache(maxsize=64)
def _measure(policy: FlashAttentionConfig, size: float, seed: int) -> _Measured:
    """Run the small Llama under a policy; on a CPU, where all dtypes run."""
    reference = _llama(size, seed)
    model = copy.deepcopy(reference)
    apply_precision_policy(model, policy)
    exact, logits = _logits(reference, seed), _logits(model, seed)
    error = ((logits - exact).norm() / exact.norm()).item()
    share = _weight_bytes(model) / _weight_bytes(reference)
    return _Measured(int((~logits.isfinite()).sum()), error, share)


def _of_overflow(policy: FlashAttentionConfig, size: float, seed: int) -> str:
    """Say which float16 overflowed: find it by changing one setting after the other."""
    said = f"logits are NaN. The MLPs write {size:,.0f} into the residual stream"
    changed: dict[str, Any] = {}
    for setting, why in (
        (
            "norm_statistics",
            "a norm that gets the stream in float16 cannot even hold it, let alone square it: "
            "norm_statistics must be float32",
        ),
        (
            "residual",
            "each one fits into float16, but the stream is their sum and does not: residual must "
            "have float32's range. It costs no weights",
        ),
        (
            "mlp",
            "which float16 cannot hold. bfloat16 can, and this device has it: its range is "
            "float32's",
        ),
    ):
        changed[setting] = torch.float32
        values = {f: getattr(policy, f) for f in (*COMPUTES, "loss", "optimizer")} | changed
        if setting == "residual" and size == BRANCH:
            continue  # each summand overflows by itself
        if not _measure(_quietly(FlashAttentionConfig, **values), size, seed).not_finite:
            return f"{said}: {why}." if setting != "mlp" else f"{said}, {why}."
    return f"{said}; float16 ends at 65,504."


def _policy(
    student: Callable[..., Any], device: str, capability: Capability
) -> FlashAttentionConfig:
    try:
        policy = _quietly(call, student, device, capability)
    except CheckFailed as failure:
        if capability is None and "TypeError" in str(failure):
            raise CheckFailed(
                f"{failure}\nA CPU has no compute capability: it is None there. Ask for "
                "device_type first."
            ) from None
        raise
    if not isinstance(policy, FlashAttentionConfig):
        said = getattr(policy, "__name__", type(policy).__name__)
        raise CheckFailed(
            f"return a FlashAttentionConfig, such as FlashAttentionConfig.bfloat16(), not {said}."
        )
    return policy


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call without the warnings of unusual policies: a check says what is wrong with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*args, **options)


def _has_bfloat16(capability: Capability) -> bool:
    """CPUs (capability None) compute in it, and GPUs from Ampere on."""
    return capability is None or capability >= (8, 0)


def _weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _logits(model: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 128, (2, 24), generator=generator)
    ids[:, 0] = 0
    with torch.no_grad():
        return model(ids, use_cache=False).logits.double()


@lru_cache(maxsize=4)
def _llama(size: float, seed: int) -> nn.Module:
    """A Llama of random weights, two of whose MLPs answer token 0 with `size` in channel 1.

    Token 0 is all in channel 0, which nobody else writes to, and the first MLP's neuron 0 listens
    to that channel alone. The second MLP's listens to channel 1, so it answers the first one.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :2] = 0
        model.model.embed_tokens.weight[0] = 0
        model.model.embed_tokens.weight[0, 0] = 10
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:2] = 0
            layer.mlp.down_proj.weight[:2] = 0
        for channel, layer in enumerate(model.model.layers[:2]):
            for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
                projection.weight[0] = 0
                projection.weight[0, channel] = 16
            layer.mlp.down_proj.weight[:, 0] = 0
            # A stream in one channel of 64 is 8 there after its norm: 16 * 8 in gate and in up.
            layer.mlp.down_proj.weight[1, 0] = size / (16 * 8) ** 2
    return model
