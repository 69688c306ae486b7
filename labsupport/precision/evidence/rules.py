"""The best-practice table: which component in which dtype, must it match, why, and the evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labsupport.precision.evidence import backward, forward

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        component: what the rule is about.
        dtype: what is recommended for it.
        must_match: what has to have the same dtype, or "no".
        why: the reason in one sentence.
        experiment: the function that shows it; returns a table.
        figure: takes that table, returns the finding in a few words.
    """

    component: str
    dtype: str
    must_match: str
    why: str
    experiment: Callable[[], pd.DataFrame]
    figure: Callable[[pd.DataFrame], str]


def _value(table: pd.DataFrame, key: str, column: str) -> float:
    """The number in `column` where the first column is `key`."""
    return table.set_index(table.columns[0])[column][key]


RULES = (
    Rule(
        "attention: q, k, v",
        "bfloat16, or float16 where magnitudes allow it; float32 on a CPU",
        "q, k and v, with each other",
        "Fused kernels take one dtype; they accumulate in float32, so that QK^T cannot overflow.",
        forward.float16_logits_overflow,
        lambda t: (
            f"all-40 inputs in float16: textbook {t['NaN in output'][0]} NaN, FlashAttention "
            f"{t['NaN in output'].iloc[-1]}"
        ),
    ),
    Rule(
        "attention: running maximum and sum",
        "float32",
        "no: inside the kernel",
        "A sum in half precision stops growing, and the weights no longer add up to 1.",
        forward.running_sum,
        lambda t: (
            f"sum of 4,096 ones: {_value(t, 'float16', 'sum'):,.0f} in float16, "
            f"{_value(t, 'bfloat16', 'sum'):,.0f} in bfloat16"
        ),
    ),
    Rule(
        "attention: error allowed",
        "judge each dtype by itself",
        "no",
        "bfloat16 has 8 significant bits at every length; a fixed tolerance fits one dtype.",
        forward.error_by_length,
        lambda t: (
            "largest error over the textbook's, all dtypes and lengths: "
            f"{t['ratio'].max():.2f} (allowed: 2)"
        ),
    ),
    Rule(
        "attention and MLP weights",
        "bfloat16 or float16, with float32 master copies",
        "the activations that meet them",
        "Updates below half a unit in the last place vanish.",
        backward.vanishing_updates,
        lambda t: (
            f"share of 100 updates lost: {_value(t, 'bfloat16', 'lost'):.0%} in bfloat16, "
            f"{_value(t, 'bfloat16, float32 master copy', 'lost'):.0%} with a master copy"
        ),
    ),
    Rule(
        "LayerNorm, RMSNorm",
        "statistics in float32; weights may be low",
        "no: input and output keep their dtype",
        "Squares overflow float16 from 256 on, and small epsilons underflow.",
        forward.norm_statistics,
        lambda t: (
            "magnitude 300, by hand in float16: relative error "
            f"{t[(t.computation == 'by hand, in float16') & (t.magnitude == 300)].iloc[0, 3]:.0%}; "
            "statistics in float32: "
            f"{t[(t.computation != 'by hand, in float16') & (t.magnitude == 300)].iloc[-1, 3]:.2%}"
        ),
    ),
    Rule(
        "embedding",
        "float32 table, output cast; low precision only with master copies",
        "tied output layer",
        "A row's update is often smaller than its last place.",
        backward.embedding_updates,
        lambda t: (
            "entries that a step of 2e-5 does not move: "
            f"{t[(t.table == 'bfloat16')].unmoved.iloc[-1]:.0%} in bfloat16, "
            f"{t[(t.table == 'float32')].unmoved.iloc[-1]:.0%} in float32"
        ),
    ),
    Rule(
        "loss",
        "float32, from the logits on",
        "no",
        "A float16 loss is coarse, and the gradients of most logits are zero.",
        backward.cross_entropy_dtypes,
        lambda t: (
            f"zero gradients of the logits: {_value(t, 'float16', 'zero gradients'):.0%} in "
            f"float16, {_value(t, 'float16, loss in float32', 'zero gradients'):.0%} in float32"
        ),
    ),
    Rule(
        "gradients",
        "scale the loss where anything is float16",
        "no",
        "Small gradients are below float16's smallest number; bfloat16 has float32's range.",
        backward.gradient_underflow,
        lambda t: (
            "error of a weight's gradient: "
            f"{t['relative error'][0]:.0%} in float16, {t['relative error'][1]:.2%} scaled by "
            "1,024"
        ),
    ),
    Rule(
        "float32 matrix products",
        "know whether TF32 is on",
        "no",
        "TF32 keeps 11 of 24 significant bits, and nothing in the dtype says so.",
        forward.tf32_surprise,
        lambda t: (
            f"relative error {t['relative error'][0]:.1e} with TF32 ({t['how'][0]}), "
            f"{t['relative error'][1]:.1e} without"
        ),
    ),
)


def best_practice_table() -> pd.DataFrame:
    """Run every rule's experiment; takes about ten seconds.

    Returns:
        component, recommended, must match, why, measured (the finding on this machine),
        experiment (the function that shows it).
    """
    import pandas as pd

    rows = [
        {
            "component": rule.component,
            "recommended": rule.dtype,
            "must match": rule.must_match,
            "why": rule.why,
            "measured": rule.figure(rule.experiment()),
            "experiment": rule.experiment.__name__,
        }
        for rule in RULES
    ]
    return pd.DataFrame(rows)
