"""The table of implementations, and the limits by which each takes or refuses a call.

To add one, write an adapter and add an entry to `BACKENDS`. `backend="auto"` takes the first that
can run a call: in the order of `preferences.py` on Hopper, where the fastest were measured, then in
the table's. cuDNN is preferred to flash-attn 2's kernels on Hopper and newer only, as in
PyTorch's own choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch

from labsupport.attention import adapters
from labsupport.attention.adapters import Kernel, Run
from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.kernels import mode
from labsupport.attention.preferences import preferred

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)
NOT_FLOAT64 = (torch.float32, torch.float16, torch.bfloat16)


class Can(Enum):
    """Options beyond plain attention that a backend may support."""

    UNEQUAL_CAUSAL = "bottom-right causal masks for seqlen_q != seqlen_k"
    WINDOW = "sliding windows (window_size)"
    ALIBI = "alibi_slopes"
    GROUPED_HEADS = "grouped-query heads (kv_heads < heads)"
    LSE = "return_lse"
    GRADIENT_ON_CPU = "gradients on a CPU"
    LSE_ON_CPU = "return_lse on a CPU"
    PACKED = "packed sequences (cu_seqlens)"
    SOFTCAP = "softcap"


USUAL = frozenset(Can) - {Can.SOFTCAP}


@dataclass(frozen=True)
class Limits:
    """The inputs that a backend takes.

    `dtypes` lists those of each device type, "*" for any; capabilities are CUDA's, the least that
    will do; a `max_head_dim` of 0 is no limit.
    """

    dtypes: dict[str, tuple[torch.dtype, ...]]
    min_capability: tuple[int, int] = (0, 0)
    min_capability_bfloat16: tuple[int, int] = (0, 0)
    max_head_dim: int = 0
    head_dim_multiple: int = 1
    can: frozenset[Can] = USUAL

    def hardware_reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why the device or the dtype excludes `call`."""
        device, dtype = call.q.device.type, call.q.dtype
        allowed = self.dtypes.get(device, self.dtypes.get("*"))
        if allowed is None:
            return [f"runs on {' and '.join(self.dtypes)}, not on {device}"]
        reasons = []
        if dtype not in allowed:
            reasons.append(
                f"takes {', '.join(map(short, allowed))} on {device}, not {short(dtype)}"
            )
        if device == "cuda":
            capability = torch.cuda.get_device_capability(call.q.device)
            needed = self.min_capability
            if dtype == torch.bfloat16:
                needed = max(needed, self.min_capability_bfloat16)
            if capability < needed:
                reasons.append(
                    f"needs compute capability {version(needed)} for {short(dtype)}, "
                    f"this GPU has {version(capability)}"
                )
        return reasons

    def option_reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why a size or an option excludes `call`."""
        reasons = []
        if self.max_head_dim and call.head_dim > self.max_head_dim:
            reasons.append(f"takes head_dim up to {self.max_head_dim}, not {call.head_dim}")
        if call.head_dim % self.head_dim_multiple:
            multiple = self.head_dim_multiple
            reasons.append(f"needs head_dim to be a multiple of {multiple}, not {call.head_dim}")
        on_cpu = call.q.device.type == "cpu"
        wanted = {
            Can.PACKED: call.packed,
            Can.WINDOW: call.windowed,
            Can.ALIBI: call.alibi_slopes is not None,
            Can.GROUPED_HEADS: call.heads != call.kv_heads,
            Can.LSE: call.return_lse,
            Can.GRADIENT_ON_CPU: call.needs_grad and on_cpu,
            Can.LSE_ON_CPU: call.return_lse and on_cpu,
            Can.SOFTCAP: call.softcap > 0,
        }
        if not call.packed:
            unequal = call.causal and call.band.offset != 0
            wanted[Can.UNEQUAL_CAUSAL] = unequal and not call.band.unlimited
        missing = [option for option, asked in wanted.items() if asked and option not in self.can]
        return reasons + [f"cannot do {option.value}" for option in missing]


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        kernel: call -> the kernel for a call that `reasons` does not exclude. What runs and what
            is reported are decided here, once.
        io_aware: True when no matrix of seqlen_q x seqlen_k scores is ever stored.
        takes_packed: False when packed calls run one per document.
        missing: () -> why it is not installed here, or None.
        further_reasons: call -> reasons that `limits` cannot express.
        in_auto: whether `backend="auto"` may choose it for this call.
        stores_mask: whether this call makes it store a mask of seqlen_q x seqlen_k.
    """

    name: str
    description: str
    limits: Limits
    kernel: Callable[[AttentionCall], Kernel]
    io_aware: bool = True
    takes_packed: bool = False
    missing: Callable[[], str | None] = lambda: None
    further_reasons: Callable[[AttentionCall], list[str]] = lambda call: []
    in_auto: Callable[[AttentionCall], bool] = lambda call: True
    stores_mask: Callable[[AttentionCall], bool] = lambda call: False

    def reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why this backend cannot run `call` here; empty when it can."""
        missing = self.missing()
        hardware = self.limits.hardware_reasons(call)
        found = [*([missing] if missing else []), *hardware, *self.limits.option_reasons(call)]
        for part in self.parts(call):
            options = self.limits.option_reasons(part)
            found += options
            # On an unknown device a kernel's own reasons mean nothing. PyTorch would print that it
            # cannot do what `limits` excludes.
            if not hardware and not options:
                found += self.further_reasons(part)
        return list(dict.fromkeys(found))

    def for_auto(self, call: AttentionCall) -> bool:
        """Return whether "auto" may choose it: not if it stores a mask of a million entries."""
        large = call.q.shape[-3] * call.k.shape[-3] > 2**20
        return self.in_auto(call) and not (large and self.stores_mask(call))

    def parts(self, call: AttentionCall) -> list[AttentionCall]:
        """The calls that this backend gets: one per document if it takes no packed sequences."""
        if not call.packed or self.takes_packed:
            return [call]
        return [document for *_, document in call.documents if document is not None]


def short(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`."""
    return str(dtype).removeprefix("torch.")


def version(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it: 8.0."""
    return f"{capability[0]}.{capability[1]}"


# --- the table ------------------------------------------------------------------------------------

# Packages whose adapters no recorded run covers: where each was compared with the oracle.
TRIED = {
    "flash-attn": "2.8.3 tried on an H200, bfloat16, head_dim 64",
    "xformers": "tried on an H200, in bfloat16",
}


def shape_comes_back(call: AttentionCall) -> bool:
    """Return whether preparing for a shape may pay off: false during decoding.

    For a new length cuDNN makes a plan (some 50 ms on an H200, in each decode step), and
    FlexAttention may compile for seconds.
    """
    return call.packed or call.q.shape[1] == call.k.shape[1]


def _cudnn_in_auto(call: AttentionCall) -> bool:
    on_hopper_or_newer = torch.cuda.get_device_capability(call.q.device) >= (9, 0)
    return on_hopper_or_newer and shape_comes_back(call)


def _always(name: str, run: Run) -> Callable[[AttentionCall], Kernel]:
    kernel = Kernel(name, run)
    return lambda call: kernel


def _sdpa(sdpa: adapters.Sdpa, **entry: Any) -> Backend:
    return Backend(
        kernel=sdpa.kernel, further_reasons=sdpa.reasons, stores_mask=sdpa.stores_mask, **entry
    )


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="fa4",
        description="flash-attn-4: CuTe DSL kernels for Hopper and Blackwell",
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(9, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=frozenset(Can) - {Can.ALIBI},
        ),
        missing=partial(
            adapters.missing,
            "flash_attn.cute",
            "flash-attn-4 is not installed: pip install 'labsupport[hopper]' (Hopper and newer)",
        ),
        further_reasons=adapters.fa4_reasons,
        kernel=_always("flash_attn.cute.flash_attn_func", adapters.run_fa4),
        takes_packed=True,
    ),
    Backend(
        name="flash_gluon",
        description="this lab's FlashAttention for Hopper, in Gluon",
        limits=Limits(dtypes={"cuda": HALF_DTYPES}, min_capability=(9, 0), can=USUAL - {Can.ALIBI}),
        missing=adapters.missing_gluon,
        kernel=adapters.gluon_kernel,
        takes_packed=True,
        further_reasons=adapters.gluon_reasons,
        in_auto=shape_comes_back,
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
            can=USUAL - {Can.UNEQUAL_CAUSAL, Can.WINDOW, Can.ALIBI},
        ),
        in_auto=_cudnn_in_auto,
    ),
    Backend(
        name="fa2",
        description=f"flash-attn 2: the authors' CUDA kernels ({TRIED['flash-attn']})",
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(8, 0),
            max_head_dim=256,
            can=frozenset(Can),
        ),
        missing=partial(
            adapters.missing,
            "flash_attn.flash_attn_interface",  # flash-attn-4 also installs into `flash_attn`
            "flash-attn is not installed: pip install --no-build-isolation 'flash-attn>=2.8' "
            "(CUDA; it compiles: theory/10-field-guide.md)",
        ),
        kernel=_always("flash_attn.flash_attn_func", adapters.run_fa2),
        takes_packed=True,
    ),
    _sdpa(
        adapters.SDPA_FLASH,
        name="sdpa_flash",
        description="PyTorch SDPA with FlashAttention (version 2 on GPUs, another kernel on CPUs)",
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": HALF_DTYPES},
            min_capability=(8, 0),
            can=USUAL - {Can.ALIBI},
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
            can=USUAL - {Can.GROUPED_HEADS},
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
            can=USUAL - {Can.WINDOW, Can.ALIBI, Can.GROUPED_HEADS},
        ),
        missing=adapters.missing_xformers,
        kernel=_always("xformers.ops.memory_efficient_attention", adapters.run_xformers),
    ),
    Backend(
        name="flex",
        description="PyTorch FlexAttention, compiled (Triton on GPUs, C++ on CPUs)",
        limits=Limits(
            dtypes={"cpu": NOT_FLOAT64, "cuda": NOT_FLOAT64},
            min_capability=(8, 0),
            can=frozenset(Can) - {Can.GRADIENT_ON_CPU, Can.LSE_ON_CPU, Can.PACKED},
        ),
        kernel=_always(
            "torch.nn.attention.flex_attention.flex_attention (compiled)", adapters.run_flex
        ),
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
        kernel=adapters.triton_kernel,
        takes_packed=True,
        further_reasons=adapters.triton_reasons,
        # After FlexAttention, so for what no other backend takes; interpreted only on request.
        in_auto=lambda call: call.q.device.type == "cuda",
    ),
    Backend(
        name="flash_torch",
        description="this lab's FlashAttention in plain PyTorch: to read, not for speed on GPUs",
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        kernel=_always(
            "labsupport.attention.flash_torch.FlashAttentionFunction", adapters.run_flash_torch
        ),
    ),
    _sdpa(
        adapters.SDPA_MATH,
        name="sdpa_math",
        description="PyTorch SDPA's textbook path: stores the scores",
        io_aware=False,
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": FLOAT_DTYPES},
            can=USUAL - {Can.LSE},
        ),
    ),
    Backend(
        name="standard",
        description="textbook attention: stores the scores and their softmax",
        io_aware=False,
        limits=Limits(dtypes={"*": FLOAT_DTYPES}, can=frozenset(Can)),
        kernel=_always("labsupport.attention.reference.masked_attention", adapters.run_standard),
    ),
)


def in_order(entries: Iterable[Backend], call: AttentionCall) -> list[Backend]:
    """Return the backends in the order in which "auto" tries them."""
    first = preferred(call)
    return sorted(entries, key=lambda x: first.index(x.name) if x.name in first else len(first))


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
