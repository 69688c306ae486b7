"""Errors of outputs against the float64 oracle."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from labsupport.attention.accuracy import compare_with_oracle, max_error, relative_error
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
    seed: int = 0,
) -> pd.DataFrame:
    """Errors of each backend in each dtype, and what flash-attn's rule allows there.

    One head of unit normal inputs, head_dim 64. A backend that does not take a dtype has no row.

    Returns:
        columns dtype, backend, max error, relative error, allowed (twice the textbook's maximum
        error in that dtype, plus 1e-5), ok; the errors as text with two digits.
    """
    import pandas as pd

    where = resolve_device(device)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(1, seqlen, 1, 64, generator=generator) for _ in range(3)]
    rows = []
    for dtype in dtypes:
        q, k, v = (tensor.to(where, getattr(torch, dtype)) for tensor in inputs)
        exact = _oracle(q, k, v, causal=False)[None]
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


class Oracle:
    """Compares the first sequence of an output in flash-attn's layout with the oracle.

    The result for the last inputs is stored: the backends of one shape share it.
    """

    def __init__(self, max_seqlen: int = 4096) -> None:
        self.max_seqlen = max_seqlen
        self._last: tuple[Hashable, torch.Tensor] | None = None

    def errors(
        self,
        key: Hashable,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        causal: bool,
    ) -> dict[str, float]:
        """max_error and relative_error (ratio of the norms); nothing above `max_seqlen`.

        Args:
            key: equal for equal inputs.
            q, out: (batch, seqlen_q, heads, head_dim).
            k, v: (batch, seqlen_k, kv_heads, head_dim).
        """
        if max(q.shape[1], k.shape[1]) > self.max_seqlen:
            return {}
        if self._last is None or key != self._last[0]:
            self._last = key, _oracle(q, k, v, causal)
        exact = self._last[1]
        return {
            "max_error": max_error(out[0], exact),
            "relative_error": relative_error(out[0], exact),
        }


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """(seqlen_q, heads, head_dim) in float64: the exact output of the first sequence."""
    group = q.shape[2] // k.shape[2]
    heads = [
        oracle_attention(q[0, :, h], k[0, :, h // group], v[0, :, h // group], causal=causal)[0]
        for h in range(q.shape[2])
    ]
    return torch.stack(heads, dim=1)
