"""Shapes to measure: presets from models that exist, and the case that a command's options name.

On a CPU the two long presets need a backend that stores no score matrix, and a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from labsupport.attention.backends import available_backends, last_call
from labsupport.profiling.grids import DIRECTIONS, Case, call_of, make_inputs

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


class Preset(NamedTuple):
    """The shape of one attention layer's call, what it stands for, and where it comes from."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    about: str
    source: str
    kv_heads: int = 0  # as many as heads


GPT2 = 'Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3'
GPT3 = 'Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1'
BERT = 'Devlin et al., "BERT" (2019), section 3'
LLAMA3 = 'heads as Llama 3 8B: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3'

PRESETS = {
    "gpt2-small": Preset(8, 1024, 12, 64, True, "a decoder layer at its full context", GPT2),
    "gpt3": Preset(1, 2048, 96, 128, True, "GPT-3 175B at its full context: wide heads", GPT3),
    "bert-base": Preset(16, 512, 12, 64, False, "an encoder: each token sees all", BERT),
    "bert-large": Preset(16, 512, 16, 64, False, "an encoder with four heads more", BERT),
    "long-8k": Preset(1, 8192, 32, 128, True, "float32 scores would fill 8 GiB", LLAMA3, 8),
    "long-16k": Preset(1, 16384, 32, 128, True, "twice as long: four times the scores", LLAMA3, 8),
    "inference-batch": Preset(64, 512, 12, 64, True, "many short prompts in one batch", GPT2),
}


def describe_presets() -> str:
    """Return all presets as lines for a terminal."""
    lines = ["presets: batch x length x heads x head_dim"]
    for name, one in PRESETS.items():
        shared = f" ({one.kv_heads} of keys and values)" if one.kv_heads else ""
        mask = "causal" if one.causal else "not causal"
        shape = f"{one.batch} x {one.seqlen} x {one.heads}{shared} x {one.head_dim}, {mask}"
        lines += [f"{name:15}  {shape}: {one.about}", f"{'':15}  from {one.source}"]
    return "\n".join(lines)


def one_case(
    device: torch.device,
    *,
    backend: str,
    preset: str | None,
    dtype: str | None,
    grad: bool,
    **own: Any,
) -> Case:
    """Return the case of a command: the default shape, or a preset's, with the options given.

    Args:
        own: fields of DEFAULTS; None where the option was left out.

    Raises:
        ValueError: an unknown preset, dtype or backend, or a size that is not positive.
    """
    shape = dict(DEFAULTS)
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"no preset {preset!r}; there are: {', '.join(PRESETS)}")
        shape = {name: getattr(PRESETS[preset], name) for name in DEFAULTS}
        if own.get("heads") and not own.get("kv_heads"):
            shape["kv_heads"] = 0  # the preset's would not fit to other heads
    shape |= {name: value for name, value in own.items() if value is not None}
    direction = DIRECTIONS[1] if grad else DIRECTIONS[0]
    case = Case(backend, dtype=dtype_named(dtype, device), direction=direction, **shape)
    if backend == "auto":  # whichever a call of 32 tokens takes
        small = replace(case, batch=1, seqlen=32, kv_seqlen=32)
        call_of(small, make_inputs(small, device))()
        return replace(case, backend=last_call().backend)  # type: ignore[union-attr]
    known = [state.name for state in available_backends(device=device)]
    if backend not in known:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(known)}")
    return case


def measurable_backends(device: torch.device) -> list[str]:
    """Return all backends that run on the device, except in Triton's interpreter."""
    names = [status.name for status in available_backends(device=device) if status.runs]
    return [name for name in names if name != "flash_triton" or device.type == "cuda"]


def dtype_named(text: str | None, device: torch.device) -> str:
    """Return PyTorch's name of a dtype; by default bfloat16 on a GPU that has it, else float32."""
    if text is None:
        ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return "bfloat16" if ampere else "float16" if device.type == "cuda" else "float32"
    return SHORT_NAMES.get(text, text)


def listed(text: str, kind: Callable[[str], Value]) -> list[Value]:
    """Return [512, 1024] for '512,1024'; raise ValueError for other words and for nothing."""
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise ValueError(f"{text!r}: values and commas are expected, such as 512,1024")
    return values
