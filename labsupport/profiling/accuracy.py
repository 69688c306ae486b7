"""Errors of outputs against the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from labsupport.attention.accuracy import compare_with_oracle
from labsupport.attention.backends import attention, available_backends
from labsupport.attention.reference import oracle_attention
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd


def errors_by_dtype(
    backends: Sequence[str],
    dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
    *,
    seqlen: int = 1024,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """Errors of each backend in each dtype, and what flash-attn's rule allows there.

    One head of unit normal inputs, head_dim 64. A backend that does not take a dtype has no row.

    Returns:
        columns dtype, backend, max error, relative error, allowed (twice the textbook's maximum
        error in that dtype, plus 1e-5), ok; the errors as text with two digits.

    >>> errors_by_dtype(["sdpa_flash"], ["float32"], seqlen=64, device="cpu").ok.tolist()
    [True]
    """
    import pandas as pd

    where = resolve_device(device)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, seqlen, 1, 64, generator=generator) for _ in range(3)]
    rows = []
    for dtype in dtypes:
        q, k, v = (tensor.to(where, getattr(torch, dtype)) for tensor in inputs)
        exact = oracle_of_first(q, k, v, causal=False)[None]
        textbook = cast(torch.Tensor, attention(q, k, v, backend="standard"))
        for status in available_backends(q, k, v):
            if not status.runs or status.name not in backends:
                continue
            out = cast(torch.Tensor, attention(q, k, v, backend=status.name))
            report = compare_with_oracle(out, textbook, exact)
            errors = report.max_error, report.relative_error, report.allowed
            rows.append((dtype, status.name, *(f"{error:.1e}" for error in errors), report.ok))
    columns = ["dtype", "backend", "max error", "relative error", "allowed", "ok"]
    return pd.DataFrame(rows, columns=columns)


def oracle_of_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """The exact output of the first sequence: (seqlen_q, heads, head_dim) in float64.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim).
    """
    group = q.shape[2] // k.shape[2]
    heads = [
        oracle_attention(q[0, :, h], k[0, :, h // group], v[0, :, h // group], causal=causal)[0]
        for h in range(q.shape[2])
    ]
    return torch.stack(heads, dim=1)
