"""Adapter to the lab's own Triton kernels, which are imported when they are first used."""

from __future__ import annotations

from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_triton import mode

Result = tuple[Tensor, Tensor | None]


def run_triton(call: AttentionCall) -> Result:
    """Run the kernels on a batch."""
    from labsupport.attention.flash_triton.operators import flash_attention_triton

    out, lse = flash_attention_triton(
        call.q,
        call.k,
        call.v,
        causal=call.causal,
        softmax_scale=call.scale,
        window_size=call.window_size,
        alibi_slopes=call.alibi_slopes,
        cu_seqlens_q=_there(call.cu_seqlens_q, call),
        cu_seqlens_k=_there(call.cu_seqlens_k, call),
    )
    return out, lse if call.return_lse else None


def _there(offsets: Tensor | None, call: AttentionCall) -> Tensor | None:
    # The kernels read them where the queries are.
    return None if offsets is None else offsets.to(call.q.device)


def triton_kernel_name(call: AttentionCall) -> str:
    """Which kernel, and compiled or interpreted: that makes all the difference."""
    from labsupport.attention.flash_triton import geometry, launch_hopper

    about = geometry.Geometry(call.scale, slopes=call.alibi_slopes, cu_seqlens_q=call.cu_seqlens_q)
    name = "forward.forward_kernel"
    if launch_hopper.takes(about, call.q, call.k, call.v):
        name = "forward_hopper.hopper_forward_kernel"
    how = ", interpreted" if mode.interpreted() else ""
    return f"labsupport.attention.flash_triton.{name}{how}"


def triton_reasons(call: AttentionCall) -> list[str]:
    """A compiled kernel runs on GPUs only."""
    if call.q.device.type == "cpu" and not mode.interpreted():
        return [f"runs on a CPU only in Triton's interpreter: set {mode.VARIABLE}=1 before Python"]
    return []
