"""How far is an output from the float64 oracle?"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from labsupport.attention.accuracy import max_error, relative_error
from labsupport.attention.reference import oracle_attention


class Oracle:
    """Compares outputs in flash-attn's layout with the oracle, head by head.

    The oracle writes seqlen x seqlen matrices in float64, so one head at a time is computed, of the
    first sequence of the batch only, and up to a length only.  The result for the last inputs is
    kept: the backends of one shape are judged by one oracle.
    """

    def __init__(self, max_seqlen: int = 4096) -> None:
        self.max_seqlen = max_seqlen
        self._key: Hashable = None
        self._output: torch.Tensor | None = None

    def covers(self, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether the oracle is computed at these lengths."""
        return max(seqlen_q, seqlen_k) <= self.max_seqlen

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
        """max_error (largest absolute difference) and relative_error (ratio of the norms).

        Args:
            key: equal for equal inputs.
            q, out: (batch, seqlen_q, heads, head_dim).
            k, v: (batch, seqlen_k, kv_heads, head_dim).
        """
        if self._output is None or key != self._key:
            self._key, self._output = key, _oracle(q, k, v, causal)
        return {
            "max_error": max_error(out[0], self._output),
            "relative_error": relative_error(out[0], self._output),
        }


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """(seqlen_q, heads, head_dim) in float64: the exact output of the first sequence."""
    group = q.shape[2] // k.shape[2]
    heads = [
        oracle_attention(q[0, :, h], k[0, :, h // group], v[0, :, h // group], causal=causal)[0]
        for h in range(q.shape[2])
    ]
    return torch.stack(heads, dim=1)
