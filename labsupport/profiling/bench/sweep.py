"""Many cases: their table, and one chart for each shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.profiling.timing import format_ms

if TYPE_CHECKING:
    import pandas as pd

# What a chart cannot mix: its x axis is the length, its lines are the backends.
FIXED = ["batch", "heads", "kv_heads", "head_dim", "dtype", "causal"]
SUFFIXES = (".png", ".svg", ".pdf")


def check_chart(path: Path | None) -> None:
    """Refuse a file that no chart can be written to, before anything long begins.

    Raises:
        ValueError: another ending than .png, .svg and .pdf.
    """
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a chart ends in {', '.join(SUFFIXES)}, not {path.suffix or path.name!r}")


def write_charts(table: pd.DataFrame, path: Path) -> list[Path]:
    """Time against length, one file for each shape among the rows; returns the files.

    One shape's file is `path`; of several, each name says what is its own: sweep-batch2-heads8.png.
    Rows without a time have no line (out of memory is a cross).
    """
    from labsupport.plotting import plot_time

    if not (table["status"] == "ok").any():
        return []
    varying = [name for name in FIXED if table[name].nunique() > 1]
    groups: Any = table.groupby(varying, sort=False) if varying else [((), table)]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for values, rows in groups:
        if not (rows["status"] == "ok").any():
            continue
        own = "".join(f"-{name}{value}" for name, value in zip(varying, values, strict=True))
        target = path.with_name(f"{path.stem}{own}{path.suffix}")
        rows.attrs = dict(table.attrs)
        plot_time(rows, title=finding(rows)).savefig(target)
        written.append(target)
    return written


def finding(rows: pd.DataFrame) -> str:
    """A chart's title: which backend is the fastest at the longest length, and by how much."""
    ran = rows[rows["status"] == "ok"]
    longest = ran[ran["seqlen"] == ran["seqlen"].max()]
    longest = longest[longest["direction"] == longest["direction"].iloc[-1]].sort_values(
        "median_ms"
    )
    first = longest.iloc[0]
    at = f"at {first['seqlen']} tokens"
    if len(longest) == 1:
        return f"{first['backend']} takes {format_ms(first['median_ms'])} ms {at}"
    last = longest.iloc[-1]
    times = last["median_ms"] / first["median_ms"]
    return f"{first['backend']} is {times:.1f} times as fast as {last['backend']} {at}"
