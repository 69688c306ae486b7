"""The table of implementations. To add one, write an adapter and add an entry here.

The order is the order of preference: `backend="auto"` takes the first that can run a call. cuDNN is
preferred to flash-attn 2's kernels on Hopper and newer only, as in PyTorch's own choice.
"""

from __future__ import annotations

import difflib

import torch
from torch.nn.attention import SDPBackend

from labsupport.attention import adapters_flex as flex
from labsupport.attention import adapters_packages as packages
from labsupport.attention import adapters_torch as builtin
from labsupport.attention import adapters_triton as own
from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.registry import (
    EVERYTHING,
    FLOAT_DTYPES,
    HALF_DTYPES,
    Backend,
    Can,
    Limits,
)


def shape_comes_back(call: AttentionCall) -> bool:
    """Whether preparing for a shape may pay off: not beside a cache that grows with each call.

    For a length not met before cuDNN makes a plan (some 50 ms on an H200, in each decode step), and
    FlexAttention may compile for seconds.
    """
    return call.packed or call.q.shape[1] == call.k.shape[1]


def _on_hopper_or_newer(call: AttentionCall) -> bool:
    return torch.cuda.get_device_capability(call.q.device) >= (9, 0)


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="fa4",
        description="flash-attn-4: CuTe DSL kernels for Hopper and Blackwell",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(9, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=EVERYTHING - {Can.ALIBI},
        ),
        missing=packages.missing_fa4,
        further_reasons=packages.fa4_reasons,
        run=packages.run_fa4,
        run_packed=packages.run_fa4_packed,
        kernel=lambda call: "flash_attn.cute.flash_attn_func",
    ),
    Backend(
        name="sdpa_cudnn",
        description="PyTorch SDPA with cuDNN's fused attention",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(8, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=EVERYTHING - {Can.UNEQUAL_CAUSAL, Can.WINDOW, Can.ALIBI},
        ),
        run=builtin.run_sdpa(SDPBackend.CUDNN_ATTENTION),
        kernel=builtin.sdpa_kernel_name(SDPBackend.CUDNN_ATTENTION),
        further_reasons=builtin.sdpa_reasons(SDPBackend.CUDNN_ATTENTION),
        in_auto=lambda call: _on_hopper_or_newer(call) and shape_comes_back(call),
    ),
    Backend(
        name="fa2",
        description="flash-attn 2: the authors' CUDA kernels",
        io_aware=True,
        limits=Limits(dtypes={"cuda": HALF_DTYPES}, min_capability=(8, 0), max_head_dim=256),
        missing=packages.missing_fa2,
        run=packages.run_fa2,
        run_packed=packages.run_fa2_packed,
        kernel=lambda call: "flash_attn.flash_attn_func",
    ),
    Backend(
        name="sdpa_flash",
        description=(
            "PyTorch SDPA with FlashAttention (version 2 on GPUs; a kernel of its own on CPUs)"
        ),
        io_aware=True,
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": HALF_DTYPES},
            min_capability=(8, 0),
            can=EVERYTHING - {Can.ALIBI},
        ),
        run=builtin.run_sdpa(SDPBackend.FLASH_ATTENTION),
        kernel=builtin.sdpa_kernel_name(SDPBackend.FLASH_ATTENTION),
        in_auto=builtin.in_auto(SDPBackend.FLASH_ATTENTION),
        stores_mask=builtin.stores_mask(SDPBackend.FLASH_ATTENTION),
        further_reasons=builtin.sdpa_reasons(SDPBackend.FLASH_ATTENTION),
    ),
    Backend(
        name="sdpa_efficient",
        description="PyTorch SDPA with memory-efficient attention; runs on GPUs before Ampere too",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": (torch.float32, torch.float16, torch.bfloat16)},
            min_capability=(5, 0),
            min_capability_bfloat16=(8, 0),
            can=EVERYTHING - {Can.GROUPED_HEADS},
        ),
        run=builtin.run_sdpa(SDPBackend.EFFICIENT_ATTENTION),
        kernel=builtin.sdpa_kernel_name(SDPBackend.EFFICIENT_ATTENTION),
        in_auto=builtin.in_auto(SDPBackend.EFFICIENT_ATTENTION),
        stores_mask=builtin.stores_mask(SDPBackend.EFFICIENT_ATTENTION),
        further_reasons=builtin.sdpa_reasons(SDPBackend.EFFICIENT_ATTENTION),
    ),
    Backend(
        name="xformers",
        description="xFormers' memory-efficient attention",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": (torch.float32, torch.float16, torch.bfloat16)},
            min_capability=(7, 0),
            min_capability_bfloat16=(8, 0),
            head_dim_multiple=8,
            can=EVERYTHING - {Can.WINDOW, Can.ALIBI, Can.GROUPED_HEADS},
        ),
        missing=packages.missing_xformers,
        run=packages.run_xformers,
        kernel=lambda call: "xformers.ops.memory_efficient_attention",
    ),
    Backend(
        name="flex",
        description="PyTorch FlexAttention, compiled (Triton on GPUs, C++ on CPUs)",
        io_aware=True,
        limits=Limits(
            dtypes={
                "cpu": (torch.float32, torch.float16, torch.bfloat16),
                "cuda": (torch.float32, torch.float16, torch.bfloat16),
            },
            min_capability=(8, 0),
            can=EVERYTHING - {Can.GRADIENT_ON_CPU, Can.LSE_ON_CPU, Can.PACKED},
        ),
        run=flex.run_flex,
        kernel=lambda call: "torch.nn.attention.flex_attention.flex_attention (compiled)",
        further_reasons=flex.flex_reasons,
        # Its first call for a shape compiles for many seconds: on a CPU only where asked for.
        in_auto=lambda call: call.q.device.type == "cuda" and shape_comes_back(call),
    ),
    Backend(
        name="flash_triton",
        description="this lab's FlashAttention as Triton kernels (on a CPU interpreted: to read)",
        io_aware=True,
        limits=Limits(
            # The interpreter computes bfloat16 wrongly.
            dtypes={
                "cpu": (torch.float32, torch.float16),
                "cuda": (torch.float32, torch.float16, torch.bfloat16),
            },
            min_capability=(8, 0),
            max_head_dim=256,
        ),
        missing=own.mode.missing,
        run=own.run_triton,
        run_packed=own.run_triton,
        kernel=own.triton_kernel_name,
        further_reasons=own.triton_reasons,
        # After FlexAttention, so for what no other backend takes; never interpreted unasked.
        in_auto=lambda call: call.q.device.type == "cuda",
    ),
    Backend(
        name="flash_torch",
        description="this lab's FlashAttention in plain PyTorch: to read, not for speed on GPUs",
        io_aware=True,
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        run=builtin.run_flash_torch,
        kernel=lambda call: "labsupport.attention.flash_torch.FlashAttentionFunction",
    ),
    Backend(
        name="sdpa_math",
        description="PyTorch SDPA's textbook path: stores the scores",
        io_aware=False,
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": FLOAT_DTYPES},
            can=EVERYTHING - {Can.LSE},
        ),
        run=builtin.run_sdpa(SDPBackend.MATH),
        kernel=builtin.sdpa_kernel_name(SDPBackend.MATH),
    ),
    Backend(
        name="standard",
        description="textbook attention: stores the scores and their softmax",
        io_aware=False,
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        run=builtin.run_standard,
        kernel=lambda call: "labsupport.attention.reference.banded_attention",
    ),
)


def by_name(name: str) -> Backend:
    """The backend of that name.

    Raises:
        AttentionInputError: there is none; names the nearest.
    """
    for entry in BACKENDS:
        if entry.name == name:
            return entry
    names = [entry.name for entry in BACKENDS]
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttentionInputError(
        f"unknown backend {name!r}.{hint} There are: auto, {', '.join(names)}."
    )
