"""Exercise 2-5: a precision policy for inference, judged by what a model does under it.

The model is a small Llama that does what large ones do: its first token carries *massive
activations*, a few entries thousands of times as large as the others (M. Sun et al. 2024,
arXiv:2402.17762, section 2). Here two MLPs write them into the residual stream.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.checks.errors import CheckFailed, kind, short
from labsupport.checks.verdict import Student, call, passed
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
WEIGHTS = ("attention_weights", "mlp", "embedding", "head")
COMPUTES = ("attention", "norm_statistics", "norm_weights", "residual", *WEIGHTS)
LARGEST_SHARE, LARGEST_ERROR = 0.55, 0.02
STREAM, BRANCH = 40_000.0, 100_000.0  # added by each of two MLPs, on old GPUs and on others


def check_policy_devices(student: Student, seed: int = 0) -> None:
    """Exercise 2-5: each device gets dtypes that its kernels and its arithmetic have."""
    for policy, capability, where in _policies(student):
        low = [f for f in COMPUTES if getattr(policy, f) == torch.bfloat16]
        if low and not _has_bfloat16(capability):
            multiplied = low[0] in ("attention", *WEIGHTS)
            lack = "tensor cores and no attention kernels" if multiplied else "arithmetic"
            raise CheckFailed(
                f"{where}{low[0]} is bfloat16. GPUs before compute capability 8.0 have no {lack} "
                "for it."
            )
        flash_on_gpu = capability is not None and capability >= (8, 0)
        if flash_on_gpu and policy.attention not in (torch.float16, torch.bfloat16):
            raise CheckFailed(
                f"{where}attention is {short(policy.attention)}: FlashAttention's kernels for GPUs "
                "take q, k and v in float16 and bfloat16 only. (Inside they use float32.)"
            )
        if policy.norm_statistics not in (torch.float32, torch.float64):
            raise CheckFailed(
                f"{where}norm_statistics is {short(policy.norm_statistics)}. A mean of squares "
                "belongs in float32: squares overflow float16 from 256 on, and bfloat16 keeps 8 "
                "bits of the sum. It costs no memory worth mentioning."
            )
    passed("every device gets dtypes that it has", seed)


def check_policy_range(student: Student, seed: int = 0) -> None:
    """Exercise 2-5: no NaN, and the logits of float32, although activations are massive.

    Raises:
        CheckFailed: the logits are not finite or too far from float32; says what overflowed.
    """
    for policy, capability, where in _policies(student):
        size = BRANCH if _has_bfloat16(capability) else STREAM
        error, _ = _measure(policy, size, seed)
        if error != error:
            raise CheckFailed(f"{where}{_of_overflow(policy, size, seed)}")
        if error > LARGEST_ERROR:
            raise CheckFailed(
                f"{where}the logits differ from float32's by {error:.1%} (in norm); "
                f"{LARGEST_ERROR:.0%} are allowed."
            )
    passed(f"finite, and within {LARGEST_ERROR:.0%} of float32, with massive activations", seed)


def check_policy_memory(student: Student, seed: int = 0) -> None:
    """Exercise 2-5: weights take half of float32's bytes, or little more.

    Raises:
        CheckFailed: they take more; says whose dtype is to blame.
    """
    for policy, _, where in _policies(student):
        _, share = _measure(policy, 0.0, seed)
        if share > LARGEST_SHARE:
            wide = [part for part in WEIGHTS if getattr(policy, part).itemsize > 2]
            raise CheckFailed(
                f"{where}the weights take {share:.0%} of float32's bytes; {LARGEST_SHARE:.0%} are "
                f"allowed. 32 bits or more: {', '.join(wide)}. Activations such as `residual` must "
                "not overflow, but their dtype costs no weights."
            )
    passed(f"weights within {LARGEST_SHARE:.0%} of float32's bytes", seed)


@lru_cache(maxsize=64)
def _measure(policy: FlashAttentionConfig, size: float, seed: int) -> tuple[float, float]:
    """Run the small Llama under a policy on the CPU, where all dtypes run.

    Returns:
        ||logits - float32's|| / ||float32's||, NaN if any is not finite; and the weights' share of
        float32's bytes.
    """
    reference = _llama(size, seed)
    model = copy.deepcopy(reference)
    apply_precision_policy(model, policy)
    exact, logits = _logits(reference, seed), _logits(model, seed)
    error = ((logits - exact).norm() / exact.norm()).item()
    share = _weight_bytes(model) / _weight_bytes(reference)
    return error if logits.isfinite().all() else float("nan"), share


def _of_overflow(policy: FlashAttentionConfig, size: float, seed: int) -> str:
    """Say which float16 overflowed: find it by changing one setting after the other."""
    say = f"logits are NaN. The MLPs write {size:,.0f} into the residual stream"
    values = {f: getattr(policy, f) for f in (*COMPUTES, "loss", "optimizer")}
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
        ("mlp", "float16 cannot hold it. bfloat16 can, and this device has it"),
    ):
        values[setting] = torch.float32
        if setting == "residual" and size == BRANCH:
            continue  # each summand alone overflows
        error, _ = _measure(_quietly(FlashAttentionConfig, **values), size, seed)
        if error == error:
            return f"{say}: {why}."
    return f"{say}; float16 ends at 65,504."


def _policies(student: Student) -> Iterator[tuple[FlashAttentionConfig, Capability, str]]:
    """Yield each device's policy and capability, and the beginning of a message.

    Raises:
        CheckFailed: no policy comes back, or the same one for all devices.
    """
    given = set()
    for device, capability, name in DEVICES:
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
            raise CheckFailed(
                f"return a policy such as FlashAttentionConfig.bfloat16(), not {kind(policy)}."
            )
        given.add(policy)
        yield policy, capability, f"my_policy({device!r}, {capability}), {name}: "
    if len(given) == 1:
        raise CheckFailed(
            "All eight devices get the same policy, and none is right for all: GPUs before "
            "compute capability 8.0 have no bfloat16, and float16 cannot hold the massive "
            "activations of the others."
        )


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call without the warnings of unusual policies: a check says what is wrong with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*args, **options)


def _has_bfloat16(capability: Capability) -> bool:
    """Return whether a CPU (None) or GPU computes in it: GPUs from Ampere on."""
    return capability is None or capability >= (8, 0)


def _weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _logits(model: Any, seed: int) -> Tensor:
    ids = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 0
    with torch.no_grad():
        return model(ids, use_cache=False).logits.double()


@lru_cache(maxsize=4)
def _llama(size: float, seed: int) -> nn.Module:
    """Return a Llama of random weights, two of whose MLPs answer token 0 with `size` in channel 1.

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
