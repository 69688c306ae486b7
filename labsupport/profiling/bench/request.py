"""From a command's options to cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from labsupport.attention.backends import attention, available_backends, last_call
from labsupport.attention.implementations import by_name
from labsupport.attention.kernels import mode
from labsupport.profiling.benchmark import make_inputs
from labsupport.profiling.cases import DIRECTIONS, DTYPES, Case
from labsupport.profiling.presets import preset as preset_named

SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}
DEFAULTS: dict[str, Any] = {
    "batch": 2,
    "seqlen": 1024,
    "heads": 8,
    "head_dim": 64,
    "causal": False,
    "kv_heads": 0,
}

Value = TypeVar("Value", int, str)


def one_case(
    device: torch.device,
    *,
    backend: str,
    preset: str | None,
    dtype: str | None,
    grad: bool,
    **own: Any,
) -> Case:
    """The case of `bench` and `compare`: the default shape, or a preset's, and what is given.

    Args:
        own: fields of DEFAULTS; None where the option was left out.

    Raises:
        ValueError: an unknown preset, dtype or backend, or a size that is not positive.
    """
    shape = dict(DEFAULTS)
    if preset is not None:
        found = preset_named(preset)
        shape = {name: getattr(found, name) for name in DEFAULTS}
        if own.get("heads") and not own.get("kv_heads"):
            shape["kv_heads"] = 0  # the preset's would not fit to other heads
    shape |= {name: value for name, value in own.items() if value is not None}
    case = Case(
        backend=backend,
        dtype=dtype_named(dtype, device),
        direction=DIRECTIONS[1] if grad else DIRECTIONS[0],
        **shape,
    )
    if backend == "auto":
        return replace(case, backend=chosen_backend(case, device))
    by_name(backend)
    return case


def chosen_backend(case: Case, device: torch.device) -> str:
    """What `attention(backend="auto")` takes for such a case, found by a call of 32 tokens.

    Raises:
        BackendUnavailableError: nothing can run it.
    """
    small = replace(case, batch=1, seqlen=32, kv_seqlen=32)
    q, k, v, _ = make_inputs(small, device, seed=0)
    attention(q, k, v, causal=case.causal, check_layout=False)
    report = last_call()
    assert report is not None, "a call leaves a report"
    return report.backend


def measurable_backends(device: torch.device) -> list[str]:
    """All backends that run on the device, without Triton's interpreter: that one is to be read."""
    names = [status.name for status in available_backends(device=device) if status.runs]
    return [name for name in names if name != "flash_triton" or not mode.interpreted()]


def dtype_named(text: str | None, device: torch.device) -> str:
    """`fp16` and `float16` as `float16`; by default bfloat16 on a GPU that has it, else float32.

    Raises:
        ValueError: an unknown dtype.
    """
    if text is None:
        ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return "bfloat16" if ampere else "float16" if device.type == "cuda" else "float32"
    name = SHORT_NAMES.get(text, text)
    if name not in DTYPES:
        known = ", ".join([*DTYPES, *SHORT_NAMES])
        raise ValueError(f"unknown dtype {text!r}; known: {known}")
    return name


def listed(text: str, kind: Callable[[str], Value]) -> list[Value]:
    """'512,1024' as [512, 1024].

    Raises:
        ValueError: a part that is no number where one is expected, or nothing at all.
    """
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{text!r}: numbers and commas are expected, such as 512,1024") from None
    if not values:
        raise ValueError(f"{text!r} names nothing: values and commas are expected")
    return values
