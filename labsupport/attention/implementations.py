"""The table of implementations. To add one, write an adapter and add an entry here.

The order is the order of preference: `backend="auto"` takes the first that can run a call. cuDNN is
preferred to flash-attn 2's kernels on Hopper and newer only, as in PyTorch's own choice.
"""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any

import torch

from labsupport.attention import adapters
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.kernels import mode
from labsupport.attention.registry import (
    EVERYTHING,
    FLOAT_DTYPES,
    HALF_DTYPES,
    AttentionCall,
    Backend,
    Can,
    Limits,
)

NOT_FLOAT64 = (torch.float32, torch.float16, torch.bfloat16)
# Packages whose adapters no recorded run covers: where each was compared with the oracle.
TRIED = {
    "flash-attn": "tried on an H100, compiled for head_dim 128 in bfloat16 alone",
    "xformers": "tried on an H100, in bfloat16",
}


def shape_comes_back(call: AttentionCall) -> bool:
    """Return whether preparing for a shape may pay off: not beside a cache that grows each call.

    For a new length cuDNN makes a plan (some 50 ms on an H200, in each decode step), and
    FlexAttention may compile for seconds.
    """
    return call.packed or call.q.shape[1] == call.k.shape[1]


def _cudnn_in_auto(call: AttentionCall) -> bool:
    on_hopper_or_newer = torch.cuda.get_device_capability(call.q.device) >= (9, 0)
    return on_hopper_or_newer and shape_comes_back(call)


def _gluon_in_auto(call: AttentionCall) -> bool:
    """Return whether cuDNN cannot run the call, or was slower in `data/runs/gluon-both-h200`."""
    if not shape_comes_back(call):
        return False
    if by_name("sdpa_cudnn").limits.option_reasons(call):
        return True
    return call.q.shape[-3] >= 2048 and (call.causal or call.head_dim == 64)


def _sdpa(sdpa: adapters.Sdpa, **entry: Any) -> Backend:
    return Backend(
        run=sdpa.run, kernel=sdpa.kernel, further_reasons=sdpa.reasons,
        stores_mask=sdpa.stores_mask, **entry,
    )  # fmt: skip


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="fa4",
        description="flash-attn-4: CuTe DSL kernels for Hopper and Blackwell",
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(9, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=EVERYTHING - {Can.ALIBI},
        ),
        missing=partial(
            adapters.missing,
            "flash_attn.cute",
            "flash-attn-4 is not installed: pip install 'labsupport[hopper]' (Hopper and newer)",
        ),
        further_reasons=adapters.fa4_reasons,
        run=adapters.run_fa4,
        run_packed=adapters.run_fa4,
        kernel=lambda call: "flash_attn.cute.flash_attn_func",
    ),
    Backend(
        name="flash_gluon",
        description="this lab's FlashAttention for Hopper, in Gluon",
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES}, min_capability=(9, 0), can=EVERYTHING - {Can.ALIBI}
        ),
        missing=adapters.missing_gluon,
        run=adapters.run_gluon,
        run_packed=adapters.run_gluon,
        kernel=lambda call: "labsupport.attention.kernels.forward_gluon._gluon_fwd",
        further_reasons=adapters.gluon_reasons,
        in_auto=_gluon_in_auto,
    ),
    _sdpa(
        adapters.SDPA_CUDNN,
        name="sdpa_cudnn",
        description="PyTorch SDPA with cuDNN's fused attention",
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(8, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=EVERYTHING - {Can.UNEQUAL_CAUSAL, Can.WINDOW, Can.ALIBI},
        ),
        in_auto=_cudnn_in_auto,
    ),
    Backend(
        name="fa2",
        description=f"flash-attn 2: the authors' CUDA kernels ({TRIED['flash-attn']})",
        limits=Limits(dtypes={"cuda": HALF_DTYPES}, min_capability=(8, 0), max_head_dim=256),
        missing=partial(
            adapters.missing,
            "flash_attn.flash_attn_interface",  # flash-attn-4 also installs into `flash_attn`
            "flash-attn is not installed: pip install --no-build-isolation 'flash-attn>=2.8' "
            "(CUDA; it compiles: theory/10-field-guide.md)",
        ),
        run=adapters.run_fa2,
        run_packed=adapters.run_fa2,
        kernel=lambda call: "flash_attn.flash_attn_func",
    ),
    _sdpa(
        adapters.SDPA_FLASH,
        name="sdpa_flash",
        description="PyTorch SDPA with FlashAttention (version 2 on GPUs, another kernel on CPUs)",
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": HALF_DTYPES},
            min_capability=(8, 0),
            can=EVERYTHING - {Can.ALIBI},
        ),
    ),
    _sdpa(
        adapters.SDPA_EFFICIENT,
        name="sdpa_efficient",
        description="PyTorch SDPA with memory-efficient attention; runs on GPUs before Ampere too",
        limits=Limits(
            dtypes={"cuda": NOT_FLOAT64},
            min_capability=(5, 0),
            min_capability_bfloat16=(8, 0),
            can=EVERYTHING - {Can.GROUPED_HEADS},
        ),
    ),
    Backend(
        name="xformers",
        description=f"xFormers' memory-efficient attention ({TRIED['xformers']})",
        limits=Limits(
            dtypes={"cuda": NOT_FLOAT64},
            min_capability=(7, 0),
            min_capability_bfloat16=(8, 0),
            head_dim_multiple=8,
            can=EVERYTHING - {Can.WINDOW, Can.ALIBI, Can.GROUPED_HEADS},
        ),
        missing=adapters.missing_xformers,
        run=adapters.run_xformers,
        kernel=lambda call: "xformers.ops.memory_efficient_attention",
    ),
    Backend(
        name="flex",
        description="PyTorch FlexAttention, compiled (Triton on GPUs, C++ on CPUs)",
        limits=Limits(
            dtypes={"cpu": NOT_FLOAT64, "cuda": NOT_FLOAT64},
            min_capability=(8, 0),
            can=EVERYTHING - {Can.GRADIENT_ON_CPU, Can.LSE_ON_CPU, Can.PACKED},
        ),
        run=adapters.run_flex,
        kernel=lambda call: "torch.nn.attention.flex_attention.flex_attention (compiled)",
        further_reasons=adapters.flex_reasons,
        # Its first call for a shape compiles for many seconds: on a CPU only where asked for.
        in_auto=lambda call: call.q.device.type == "cuda" and shape_comes_back(call),
    ),
    Backend(
        name="flash_triton",
        description="this lab's FlashAttention as Triton kernels (on a CPU interpreted: to read)",
        limits=Limits(
            # The interpreter computes bfloat16 wrongly.
            dtypes={"cpu": (torch.float32, torch.float16), "cuda": NOT_FLOAT64},
            min_capability=(8, 0),
            max_head_dim=256,
        ),
        missing=mode.missing,
        run=adapters.run_triton,
        run_packed=adapters.run_triton,
        kernel=adapters.triton_kernel_name,
        further_reasons=adapters.triton_reasons,
        # After FlexAttention, so for what no other backend takes; never interpreted unasked.
        in_auto=lambda call: call.q.device.type == "cuda",
    ),
    Backend(
        name="flash_torch",
        description="this lab's FlashAttention in plain PyTorch: to read, not for speed on GPUs",
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        run=adapters.run_flash_torch,
        kernel=lambda call: "labsupport.attention.flash_torch.FlashAttentionFunction",
    ),
    _sdpa(
        adapters.SDPA_MATH,
        name="sdpa_math",
        description="PyTorch SDPA's textbook path: stores the scores",
        io_aware=False,
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": FLOAT_DTYPES},
            can=EVERYTHING - {Can.LSE},
        ),
    ),
    Backend(
        name="standard",
        description="textbook attention: stores the scores and their softmax",
        io_aware=False,
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        run=adapters.run_standard,
        kernel=lambda call: "labsupport.attention.reference.masked_attention",
    ),
)


# Functions of a user's own, by the names that `register_backend` gave them; "auto" takes none.
own: dict[str, Backend] = {}


def by_name(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        AttentionInputError: there is none; names the nearest.
    """
    for entry in (*BACKENDS, *own.values()):
        if entry.name == name:
            return entry
    names = [*(entry.name for entry in BACKENDS), *own]
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttentionInputError(
        f"unknown backend {name!r}.{hint} There are: auto, {', '.join(names)}."
    )
