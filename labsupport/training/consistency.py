"""Comparison of two trainings: FlashAttention's losses against textbook attention's.

Two implementations round differently, and training lets differences grow. Three questions still
have answers: are the first step's gradients as near to the exact ones as the textbook's? How long
do the losses stay together? And do the curves differ by more than those of two seeds? `python -m
benchmarks agreement` records the answers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def together(table: pd.DataFrame, steps: int = 20) -> float:
    """Return the largest difference of two attentions' losses, of equal seed, in the first steps.

    Args:
        table: one row a step of each run: backend, seed, step, loss.

    Returns:
        NaN if one of those losses is.

    Raises:
        ValueError: no seed has two attentions.
    """
    first = table[table.step < steps]
    if first.loss.isna().any():  # what pivot_table would leave out
        return math.nan
    wide = first.pivot_table(index=["seed", "step"], columns="backend", values="loss").dropna()
    if wide.shape[1] < 2 or wide.empty:
        raise ValueError("losses of two attentions with the same seed are needed")
    return float((wide.max(axis=1) - wide.min(axis=1)).max())
