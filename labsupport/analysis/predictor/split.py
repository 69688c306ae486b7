"""Which shapes a predictor is calibrated on, and which it is tested with: a list, written first.

A shape is everything that two cases share but the backend and the direction. A shape goes to one
side whole, so nothing about a tested shape is known, not even by another backend. The rule: of a
run's sequence lengths the shortest, the middle and the longest calibrate, in both masks; the
lengths between them are tested. On the CPU two forms, a larger batch and grouped heads, are tested
at every length and never calibrate.

Whoever looks at held-out errors and then changes the model has no held-out shapes any more. It
happened once: attention-h200, first split at 2048, showed that launches overlap with work (5.4%
off, but only 10 of 12 choices good). The model was changed, the run split anew at the other of its
two middle lengths, and peers-h200:calls, which nobody had looked at, tested as well. The rule for
the interval's width, which reads calibration shapes only, was settled after its coverage was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from labsupport.profiling.cases import Case
from labsupport.profiling.runs import load_run

if TYPE_CHECKING:
    import pandas as pd

SHAPE = ("batch", "seqlen", "kv_seqlen", "heads", "kv_heads", "head_dim", "dtype", "causal")


@dataclass(frozen=True)
class Split:
    """The calibration shapes of a run: lengths, and forms (batch, heads, kv_heads); None is any.

    column: which of the run's times is meant: median_ms; call_ms, the calls from Python of a run
        whose median_ms comes from CUDA graphs.
    """

    seqlens: tuple[int, ...]
    forms: tuple[tuple[int, int, int], ...] | None = None
    column: str = "median_ms"

    def calibrates(self, case: Case) -> bool:
        """Whether the case may be seen while parameters are fitted."""
        form = case.batch, case.heads, case.kv_heads
        return case.seqlen in self.seqlens and (self.forms is None or form in self.forms)


SPLITS = {
    "attention-h200": Split((512, 4096, 16_384)),
    "peers-h200": Split((512, 2048, 16_384)),
    "peers-h200:calls": Split((512, 2048, 16_384), column="call_ms"),
    "calibration-cpu": Split((128, 512, 2048), forms=((1, 4, 4),)),
}


def recorded(name: str) -> pd.DataFrame:
    """The recorded run behind a name of SPLITS, its time in the column `ms`.

    Raises:
        ValueError: no split is written for that name.
    """
    if name not in SPLITS:
        raise ValueError(f"no split is written for run {name!r}; known: {', '.join(SPLITS)}")
    table = load_run(name.split(":")[0])
    table["ms"] = table[SPLITS[name].column]
    # Of a normal distribution, the quartiles lie 1.35 standard deviations apart.
    table["spread"] = (table.q3_ms - table.q1_ms) / table.median_ms / 1.35
    return table


def case_of(row: Any) -> Case:
    """The case of one row of a recorded run (a mapping, or a row of a DataFrame)."""
    plain: dict[str, Any] = {}
    for field in fields(Case):
        value = row[field.name]
        plain[field.name] = value.item() if hasattr(value, "item") else value
    return Case(**plain)


def divide(table: pd.DataFrame, split: Split) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(calibration, held out): the rows that were measured, with a column `case`."""
    import pandas as pd

    ran = table[table.status == "ok"].copy()
    cases = [case_of(row) for _, row in ran.iterrows()]
    ran["case"] = pd.Series(cases, index=ran.index, dtype=object)
    seen = pd.Series([split.calibrates(case) for case in cases], index=ran.index, dtype=bool)
    return ran[seen].reset_index(drop=True), ran[~seen].reset_index(drop=True)
