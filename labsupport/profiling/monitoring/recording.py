"""What do the samples say: peak, average over time, gaps, a table?"""

from __future__ import annotations

import math
import threading
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

from labsupport.profiling.monitoring import gpu as gpu_readings
from labsupport.profiling.monitoring.gpu import throttle_names

if TYPE_CHECKING:
    import pandas as pd


class Recording:
    """Samples, one row each: seconds since the start, then what `columns` names.

    Values are numbers; NaN stands for what was not read. It can be read while it grows.
    """

    def __init__(self, columns: tuple[str, ...], interval: float) -> None:
        self.columns = ("time_s", *columns)
        self.interval = interval
        self._values = array("d")
        self._lock = threading.Lock()

    def add(self, row: tuple[float, ...]) -> None:
        """Append one row, as long as `columns`."""
        if len(row) != len(self.columns):
            raise ValueError(f"{len(row)} values were given for {len(self.columns)} columns")
        with self._lock:
            self._values.extend(row)

    def column(self, name: str) -> list[float]:
        """All values of a column, the oldest first."""
        with self._lock:
            return self._values[self.columns.index(name) :: len(self.columns)].tolist()

    def points(self, name: str) -> list[tuple[float, float]]:
        """(seconds, value) wherever the column was read; empty if there is no such column."""
        if name not in self.columns:
            return []
        pairs = zip(self.column("time_s"), self.column(name), strict=False)
        return [(t, value) for t, value in pairs if not math.isnan(value)]

    def peak(self, name: str) -> tuple[float, float]:
        """(seconds, value) of the largest value; NaN, NaN if there is none."""
        return max(self.points(name), key=lambda point: point[1], default=(math.nan, math.nan))

    def start(self, name: str) -> float:
        """The first value; NaN if there is none."""
        points = self.points(name)
        return points[0][1] if points else math.nan

    def mean(self, name: str) -> float:
        """The average over time: between two samples the value is taken to change evenly."""
        points = self.points(name)
        if not points:
            return math.nan
        lasted = points[-1][0] - points[0][0]
        if lasted <= 0:
            return points[0][1]
        area = sum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(points))
        return area / lasted

    def largest_gap(self) -> float:
        """The longest time between two samples, in seconds; 0 with fewer than two."""
        return max((t1 - t0 for t0, t1 in pairwise(self.column("time_s"))), default=0.0)

    def throttled(self) -> dict[str, float]:
        """What slowed the GPU's clocks, and in which share of the samples."""
        points = self.points("gpu_throttle")
        counts: dict[str, int] = {}
        for _, mask in points:
            for reason in filter(None, throttle_names(mask).split("+")):
                counts[reason] = counts.get(reason, 0) + 1
        wanted = gpu_readings.CHOSEN_CLOCKS
        return {name: n / len(points) for name, n in counts.items() if name not in wanted}

    def frame(self) -> pd.DataFrame:
        """The samples as a DataFrame; throttle reasons as names, joined by '+'."""
        import pandas as pd

        frame = pd.DataFrame({name: self.column(name) for name in self.columns})
        if "processes" in frame:
            frame["processes"] = frame["processes"].astype(int)
        if "gpu_throttle" in frame:
            frame["gpu_throttle"] = frame["gpu_throttle"].map(throttle_names)
        return frame


def format_row(columns: tuple[str, ...], row: tuple[float, ...]) -> str:
    """One sample as a line of CSV: seconds with milliseconds, whole bytes; empty for NaN."""
    return ",".join(map(_format_value, columns, row))


def _format_value(column: str, value: float) -> str:
    if math.isnan(value):
        return ""
    if column == "gpu_throttle":
        return throttle_names(value)
    if column == "time_s":
        return f"{value:.3f}"
    return f"{value:.1f}" if column == "gpu_power_w" else f"{value:.0f}"
