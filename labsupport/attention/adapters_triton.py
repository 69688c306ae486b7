"""Adapter to the lab's own Triton kernels, which are imported when they are first used."""

from __future__ import annotations

from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_triton import mode

Result = tuple[Tensor, Tensor | None]


def run_triton(call: AttentionCall) -> Result:
    """Run the kernels on a batch."""
    from labsupport.attention.flash_triton.operators import flash_attention_triton

    return flash_attention_triton(
        call.q,
        call.k,
        call.v,
        causal=call.causal,
        softmax_scale=call.scale,
        window_size=call.window_size,
        alibi_slopes=call.alibi_slopes,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
    )


def triton_kernel_name(call: AttentionCall) -> str:
    """Compiled or interpreted: that makes all the difference."""
    how = ", interpreted" if mode.interpreted() else ""
    return f"labsupport.attention.flash_triton.forward.forward_kernel{how}"


def triton_reasons(call: AttentionCall) -> list[str]:
    """A compiled kernel runs on GPUs only."""
    if call.q.device.type == "cpu" and not mode.interpreted():
        return [f"runs on a CPU only in Triton's interpreter: set {mode.VARIABLE}=1 before Python"]
    return []
