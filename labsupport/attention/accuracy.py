"""Errors of a result against a float64 oracle, and how large they may be.

Two correct implementations of attention differ, because floating-point addition is not associative.
A fixed tolerance ("1e-5") fits one dtype, one length and one head_dim by luck. flash-attn's tests
use a rule that needs no luck: the truth is a float64 oracle, and an implementation may err by at
most twice what textbook attention errs in the same dtype on the same inputs (three times for
gradients), plus 1e-5.

Source: tests/test_flash_attn.py of Dao-AILab/flash-attention (there with a float32 oracle).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUT_FACTOR, GRADIENT_FACTOR, FLOOR = 2.0, 3.0, 1e-5


@dataclass(frozen=True)
class ErrorReport:
    """Errors of a result against the oracle, and textbook attention's in the same dtype."""

    max_error: float
    textbook_max_error: float
    relative_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Within the rule; NaN and an infinite error never are."""
        return self.max_error <= self.allowed and self.max_error < torch.inf

    def __str__(self) -> str:
        verdict = "within" if self.ok else "NOT within"
        return (
            f"maximum error {self.max_error:.1e}, {verdict} the allowed {self.allowed:.1e} "
            f"(textbook attention in this dtype: {self.textbook_max_error:.1e}); "
            f"relative error {self.relative_error:.1e}"
        )


def compare_with_oracle(
    result: Tensor, textbook: Tensor, oracle: Tensor, *, gradient: bool = False
) -> ErrorReport:
    """Judge `result`, of any shape and dtype, by flash-attn's rule.

    Args:
        textbook: the same quantity by textbook attention in the same dtype.
        oracle: the same quantity in float64.
        gradient: allow three times the textbook's error, not twice.

    Raises:
        ValueError: the shapes differ.

    >>> q, k, v = torch.randn(3, 4, 16, 8)
    >>> textbook, exact = standard_attention(q, k, v)[0], oracle_attention(q, k, v)[0]
    >>> compare_with_oracle(flash_attention_forward(q, k, v)[0], textbook, exact).ok
    True
    """
    if not result.shape == textbook.shape == oracle.shape:
        raise ValueError(
            "result, textbook and oracle must have one shape, but "
            f"{tuple(result.shape)}, {tuple(textbook.shape)}, {tuple(oracle.shape)} were given."
        )
    textbook_max = max_error(textbook, oracle)
    allowed = (GRADIENT_FACTOR if gradient else OUTPUT_FACTOR) * textbook_max + FLOOR
    return ErrorReport(
        max_error(result, oracle), textbook_max, relative_error(result, oracle), allowed
    )


def max_error(result: Tensor, oracle: Tensor) -> float:
    """Largest absolute difference; NaN if either holds one, 0 between equal infinities."""
    difference = _difference(result, oracle).abs()
    return difference.max().item() if difference.numel() else 0.0


def relative_error(result: Tensor, oracle: Tensor) -> float:
    """||result - oracle|| / ||oracle|| (Frobenius norms, without infinities that both hold).

    0 where result and oracle are equal, although the oracle is 0.
    """
    error = torch.linalg.vector_norm(_difference(result, oracle)).item()
    size = torch.linalg.vector_norm(oracle.double().masked_fill(oracle.isinf(), 0.0)).item()
    return error / size if size else error and torch.inf * error


def _difference(result: Tensor, oracle: Tensor) -> Tensor:
    result, oracle = result.double(), oracle.double()
    return (result - oracle).masked_fill(result == oracle, 0.0)
