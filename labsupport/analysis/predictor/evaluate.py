"""How far is the predictor off, on shapes that it has not seen?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labsupport.analysis.predictor.calibration import Model
from labsupport.analysis.predictor.predict import OutOfRangeError, predict
from labsupport.analysis.predictor.split import SHAPE
from labsupport.profiling.cases import Case

if TYPE_CHECKING:
    import pandas as pd

WITHIN = 1.05  # a choice is good that is at most this many times as slow as the best


def with_predictions(held_out: pd.DataFrame, model: Model) -> pd.DataFrame:
    """The rows with predicted_ms, low_ms, high_ms, predicted_bytes, and errors as fractions.

    error is (predicted - measured) / measured of the time; memory_error the same of the peak, NaN
    where a run did not measure it; covered says whether the interval holds the measured time. Cases
    that the model refuses to predict, as too far from those it has seen, are left out:
    `refused_cases` has them.
    """
    import numpy as np

    table = held_out.drop(refused_cases(held_out, model).index).copy()
    found = [predict(case, model) for case in table.case]
    table["predicted_ms"] = [p.ms for p in found]
    table["low_ms"] = [p.low_ms for p in found]
    table["high_ms"] = [p.high_ms for p in found]
    table["predicted_bytes"] = [
        np.nan if p.peak_memory_bytes is None else p.peak_memory_bytes for p in found
    ]
    table["error"] = table.predicted_ms / table.ms - 1
    table["covered"] = table.ms.between(table.low_ms, table.high_ms)
    if "peak_memory_bytes" in table:
        table["memory_error"] = table.predicted_bytes / table.peak_memory_bytes - 1
    else:
        table["memory_error"] = np.nan
    return table


def refused_cases(held_out: pd.DataFrame, model: Model) -> pd.DataFrame:
    """The rows that the model refuses to predict, with the reason in the column `refusal`."""

    def reason(case: Case) -> str:
        try:
            predict(case, model)
        except OutOfRangeError as error:
            return str(error)
        return ""

    table = held_out.copy()
    table["refusal"] = [reason(case) for case in table.case]
    return table[table.refusal != ""]


def errors_by(
    table: pd.DataFrame, columns: Sequence[str] = ("backend", "direction")
) -> pd.DataFrame:
    """Mean and largest absolute errors in percent, and the interval's coverage; `all` comes last.

    Args:
        table: as `with_predictions` returns it.
        columns: what to group by.
    """
    import pandas as pd

    def row(group: pd.DataFrame) -> dict[str, float]:
        time, memory = 100 * group.error.abs(), 100 * group.memory_error.abs()
        return {
            "cases": len(group),
            "time_mape": time.mean(),
            "time_median": time.median(),
            "time_worst": time.max(),
            "memory_mape": memory.mean(),
            "memory_worst": memory.max(),
            "covered": 100 * group.covered.mean(),
        }

    rows = [
        dict(zip(columns, key, strict=True)) | row(group)
        for key, group in table.groupby(list(columns), sort=False)
    ]
    everything = dict.fromkeys(columns, "") | {columns[0]: "all"} | row(table)
    return pd.DataFrame([*rows, everything])


def choices(table: pd.DataFrame) -> pd.DataFrame:
    """For each held-out shape and direction: the backend chosen, the best, and what choosing costs.

    Returns:
        SHAPE's columns, direction, chosen, best, and times_best: the chosen one's measured time
        over the best's.
    """
    import pandas as pd

    keys = [*SHAPE, "direction"]
    rows = []
    for key, group in table.groupby(keys, sort=False):
        chosen = group.loc[group.predicted_ms.idxmin()]
        best = group.loc[group.ms.idxmin()]
        rows.append(
            dict(zip(keys, key, strict=True))
            | {"chosen": chosen.backend, "best": best.backend}
            | {"times_best": chosen.ms / best.ms}
        )
    return pd.DataFrame(rows)


def good_choices(table: pd.DataFrame) -> float:
    """The fraction of choices within 5% of the best's time."""
    return float((choices(table).times_best <= WITHIN).mean())
