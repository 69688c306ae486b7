"""Errors of the predictor, on shapes that it has not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from labsupport.analysis.predictor.calibration import Model
from labsupport.analysis.predictor.predict import OutOfRangeError, predict
from labsupport.analysis.predictor.split import SHAPE

if TYPE_CHECKING:
    import pandas as pd


def with_predictions(held_out: pd.DataFrame, model: Model) -> pd.DataFrame:
    """The rows with predicted_ms, low_ms, high_ms, predicted_bytes, and errors as fractions.

    error is (predicted - measured) / measured of the time; memory_error the same of the peak, NaN
    where a run did not measure it; covered says whether the interval holds the measured time. Cases
    that the model refuses to predict, as too far from those it has seen, are left out;
    `.attrs["refused"]` has the reason for each, by the row's index.
    """
    found, refused = {}, {}
    for index, case in held_out.case.items():
        try:
            found[index] = predict(case, model)
        except OutOfRangeError as error:
            refused[index] = str(error)
    table = held_out.loc[list(found)].copy()
    table["predicted_ms"] = [p.ms for p in found.values()]
    table["low_ms"] = [p.low_ms for p in found.values()]
    table["high_ms"] = [p.high_ms for p in found.values()]
    memory = [p.peak_memory_bytes for p in found.values()]
    table["predicted_bytes"] = np.array(memory, dtype=float)  # None is NaN
    table["error"] = table.predicted_ms / table.ms - 1
    table["covered"] = table.ms.between(table.low_ms, table.high_ms)
    table["memory_error"] = table.predicted_bytes / table.get("peak_memory_bytes", np.nan) - 1
    table.attrs["refused"] = refused
    return table


def choices(table: pd.DataFrame) -> pd.DataFrame:
    """For each held-out shape and direction: the backend chosen, the best, and what choosing costs.

    Returns:
        SHAPE's columns, direction, chosen, best, and times_best: the chosen one's measured time
        over the best's.
    """
    import pandas as pd

    keys, rows = [*SHAPE, "direction"], []
    for key, group in table.groupby(keys, sort=False):
        chosen = group.loc[group.predicted_ms.idxmin()]
        best = group.loc[group.ms.idxmin()]
        rows.append((*key, chosen.backend, best.backend, chosen.ms / best.ms))
    return pd.DataFrame(rows, columns=[*keys, "chosen", "best", "times_best"])
