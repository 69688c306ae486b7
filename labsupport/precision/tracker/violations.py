"""What is wrong with the inputs of one attention call, before it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labsupport.attention import AttentionInputError, available_backends
from labsupport.attention.call import AttentionCall
from labsupport.attention.implementations import BACKENDS, by_name
from labsupport.attention.inputs import check_model_layout
from labsupport.attention.registry import Limits
from labsupport.precision.dtypes import range_of, short
from labsupport.precision.tracker.records import MEASURED, Part

FLASH_KERNELS = ("fa4", "sdpa_cudnn", "fa2", "sdpa_flash")
FLOAT16_MAX = torch.finfo(torch.float16).max
# Where there is a GPU, PyTorch itself is asked (`Backend.further_reasons`); where there is none,
# this is what it would say (PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
# check_head_dim_size_flash; for NVIDIA).
SDPA_FLASH_MAX_HEAD_DIM_ON_CUDA = 256
NEAR = 2  # "near overflow": another doubling would overflow


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong.

    Attributes:
        kind: mixed dtypes, unsupported dtype, no flash kernel, mixed devices, shapes, NaN,
            infinity, overflow, near overflow, underflow, or stopped.
        where: the module, the attention call, or the gradient.
        message: what was found.
        remedy: the shortest way out.
    """

    kind: str
    where: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.message}. {self.remedy}."


def mixed_dtypes(part: Part, where: str, autocast: bool) -> Violation | None:
    """What happens to q, k and v of different dtypes; None if they have one."""
    if len(set(part.dtypes)) < 2:
        return None
    message = part.by_name()
    if autocast:
        message += "; autocast lets SDPA cast them silently, flash-attn's own functions raise"
    else:
        message += (
            "; SDPA and flash-attn raise RuntimeError, flash-attn-4 AssertionError, the lab's "
            "attention AttentionInputError"
        )
    remedy = (
        "Cast them to the dtype you mean before the call, e.g. k = k.to(v.dtype); rotary "
        "embeddings computed in float32 are a common cause"
    )
    return Violation("mixed dtypes", where, message, remedy)


def judge_attention_input(
    q: Tensor, k: Tensor, v: Tensor, where: str, device: str | None = None
) -> list[Violation]:
    """Everything that keeps q, k and v from a flash kernel, or spoils its result.

    Args:
        q, k, v: in flash-attn's layout (batch, seqlen, heads, head_dim). Of other ranks only
            dtypes, devices and values are judged.
        where: what to call this call.
        device: the type of device to judge for ("cuda"); by default the tensors' own.

    Raises:
        AttentionInputError: one of them is no tensor.
    """
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        check_model_layout(q, k, v)
    part = Part([q, k, v], None, ("q", "k", "v"))
    target = device or q.device.type
    found: list[Violation] = []
    if mixed := mixed_dtypes(part, where, autocast_is_on(target)):
        found.append(mixed)
    devices = {name: str(x.device) for name, x in zip("qkv", (q, k, v), strict=True)}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {place}" for name, place in devices.items())
        found.append(
            Violation("mixed devices", where, listing, "Move them to one device: k.to(q.device)")
        )
    refused = [
        _unsupported(dtype, where, target)
        for dtype in dict.fromkeys(part.dtypes)
        if not any(dtype in takes for takes in _flash_dtypes(target).values())
    ]
    found += refused
    if any(x.ndim == 4 for x in (q, k, v)):
        if wrong := _wrong_shapes(q, k, v, where):
            found.append(wrong)
        elif not found and target == q.device.type:
            found += _kernel_reasons(q, k, v, where)
        elif not found:
            found += _kernel_reasons_elsewhere(q, k, v, where, target)
    if not any(x.is_meta for x in (q, k, v)):
        found += _judge_values(q, k, v, where)
    return found


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for that type of device."""
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device type without autocast
        return False


def _flash_dtypes(device: str) -> dict[str, tuple[torch.dtype, ...]]:
    return {name: by_name(name).limits.dtypes.get(device, ()) for name in FLASH_KERNELS}


def _unsupported(dtype: torch.dtype, where: str, device: str) -> Violation:
    takers: dict[str, list[str]] = {}
    for name, takes in _flash_dtypes(device).items():
        if takes:
            takers.setdefault(", ".join(map(short, takes)), []).append(name)
    listing = "; ".join(f"{', '.join(names)}: {takes} only" for takes, names in takers.items())
    message = f"no flash kernel takes {short(dtype)} on {device} ({listing or 'there is none'})"
    if not takers:
        remedy = "Use attention(..., backend='auto'): it takes the best backend that there is"
    elif dtype == torch.float32:
        remedy = (
            "Cast q, k and v to bfloat16 (or float16); to stay in float32 use a backend that "
            "takes it: attention(..., backend='sdpa_efficient')"
        )
    elif dtype.is_floating_point and dtype.itemsize > 1:
        remedy = "Cast q, k and v to bfloat16 (or float16)"
    elif dtype.is_floating_point:
        remedy = "float8 needs scales that these kernels do not know: cast to bfloat16"
    else:
        remedy = "Attention needs real floating numbers: look why these are not"
    return Violation("unsupported dtype", where, message, remedy)


def _shadow(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype without numbers."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _wrong_shapes(q: Tensor, k: Tensor, v: Tensor, where: str) -> Violation | None:
    try:
        check_model_layout(*(_shadow(x).to(torch.float32) for x in (q, k, v)))
    except AttentionInputError as error:
        return Violation("shapes", where, str(error).rstrip("."), "Mend the shapes first")
    return None


def _kernel_reasons(q: Tensor, k: Tensor, v: Tensor, where: str) -> list[Violation]:
    table = available_backends(q, k, v)
    if any(table[name].runs for name in FLASH_KERNELS):
        return []
    listing = "; ".join(f"{name} {', '.join(table[name].reasons)}" for name in FLASH_KERNELS)
    others = ", ".join(status.name for status in table if status.runs) or "none"
    return [Violation("no flash kernel", where, listing, f"Backends that can run it: {others}")]


def _kernel_reasons_elsewhere(
    q: Tensor, k: Tensor, v: Tensor, where: str, device: str
) -> list[Violation]:
    """What the sizes alone say for a device that is not here; all packages count as installed."""
    call = AttentionCall(_shadow(q), _shadow(k), _shadow(v))
    takes = {
        entry.name: _limits(entry.name, device)
        for entry in BACKENDS
        if q.dtype in entry.limits.dtypes.get(device, entry.limits.dtypes.get("*", ()))
    }
    reasons = {name: limits.option_reasons(call) for name, limits in takes.items()}
    flash = {name: reasons[name] for name in FLASH_KERNELS if name in reasons}
    if not all(flash.values()):
        return []
    listing = "; ".join(f"{name} {', '.join(why)}" for name, why in flash.items())
    others = ", ".join(name for name, why in reasons.items() if not why) or "none"
    return [Violation("no flash kernel", where, listing, f"Backends that may run it: {others}")]


def _limits(name: str, device: str) -> Limits:
    limits = by_name(name).limits
    if name == "sdpa_flash" and device == "cuda":
        return replace(limits, max_head_dim=SDPA_FLASH_MAX_HEAD_DIM_ON_CUDA)
    return limits


def _judge_values(q: Tensor, k: Tensor, v: Tensor, where: str) -> list[Violation]:
    found = []
    finite = True
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.dtype not in MEASURED or x.numel() == 0:
            continue
        held = range_of(x)
        if not held.finite:
            finite = False
            message = f"{name} holds {held.nonfinite} of {held.entries} entries"
            found.append(
                Violation(
                    "NaN" if held.nan else "infinity",
                    where,
                    message,
                    "Look for the layer that made them: with PrecisionTracker(model)",
                )
            )
        if x.dtype == torch.float16 and held.largest * NEAR > FLOAT16_MAX:
            message = f"{name} holds {held.largest:.3g}; float16 ends at {FLOAT16_MAX:,.0f}"
            found.append(Violation("near overflow", where, message, "Use bfloat16"))
    halves = q.dtype == k.dtype == torch.float16 and q.device == k.device
    if finite and halves and q.numel() and k.numel():
        # |q . k| <= |q| |k| (Cauchy and Schwarz): below the limit, no score can overflow.
        bound = float(_largest_norm(q) * _largest_norm(k))
        if bound > FLOAT16_MAX:
            message = (
                f"a score q·k may reach {bound:.3g} before it is scaled; float16 ends at "
                f"{FLOAT16_MAX:,.0f}"
            )
            remedy = (
                "Textbook attention in float16 may give infinity here, though flash kernels keep "
                "scores in float32: use bfloat16, or scale q before the product"
            )
            found.append(Violation("overflow", where, message, remedy))
    return found


def _largest_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32).amax()
