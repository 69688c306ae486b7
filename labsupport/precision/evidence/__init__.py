"""One small experiment for each rule about dtypes: what goes wrong, by how much, what mends it.

    forward    scores, norms, sums, products
    backward   losses, gradients, updates
    rules      the best-practice table: each rule with its experiment
    gpt2       a GPT-2 trained under several policies

The functions run in seconds on a CPU and use seeds of their own.
"""

from labsupport.precision.evidence.backward import (
    cross_entropy_dtypes,
    embedding_updates,
    gradient_underflow,
    vanishing_updates,
)
from labsupport.precision.evidence.forward import (
    dtype_refusals,
    error_by_length,
    error_by_scale,
    float16_logits_overflow,
    norm_statistics,
    running_sum,
    tf32_surprise,
)
from labsupport.precision.evidence.rules import RULES, Rule, best_practice_table

__all__ = [
    "RULES",
    "Rule",
    "best_practice_table",
    "cross_entropy_dtypes",
    "dtype_refusals",
    "embedding_updates",
    "error_by_length",
    "error_by_scale",
    "float16_logits_overflow",
    "gradient_underflow",
    "norm_statistics",
    "running_sum",
    "tf32_surprise",
    "vanishing_updates",
]
