"""The command `labsupport sweep`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labsupport import commands as options
from labsupport.interrupt import interrupted_status

if TYPE_CHECKING:
    import pandas as pd

Option = typer.Option
# What a chart cannot mix: its x axis is the length, its lines are the backends.
FIXED = ["batch", "heads", "kv_heads", "head_dim", "dtype", "causal"]


def sweep_command(
    seqlen: Annotated[
        str, Option(envvar="LABSUPPORT_SEQLEN", help="Lengths, with commas.")
    ] = "512,1024,2048",
    batch: Annotated[str, Option(envvar="LABSUPPORT_BATCH", help="Batches, with commas.")] = "2",
    nheads: Annotated[
        str, Option(envvar="LABSUPPORT_NHEADS", help="Query heads, with commas.")
    ] = "8",
    kv_heads: Annotated[str, Option(help="Key/value heads, with commas; 0: as --nheads.")] = "0",
    headdim: Annotated[str, Option(help="Head sizes, with commas.")] = "64",
    backends: Annotated[
        str | None, Option(help="Names, with commas. Default: all that run here.")
    ] = None,
    causal: Annotated[bool, Option("--causal", help="Hide the future.")] = False,
    dtype: options.Dtype = None,
    no_grad: options.NoGrad = False,
    repeats: options.Repeats = None,
    max_seconds: options.MaxSeconds = 1.0,
    errors: Annotated[bool, Option("--errors", help="Compare outputs with float64, too.")] = False,
    chart: Annotated[
        Path | None, Option(help="Time against length, as .png, .svg or .pdf; one for each shape.")
    ] = None,
    device: options.Device = None,
    quiet: Annotated[bool, Option("--quiet", help="No progress bar.")] = False,
    to_json: options.Json = None,
    to_csv: options.Csv = None,
) -> None:
    """Measure many cases: lengths, batches, heads, backends. Control-C keeps the rows so far.

    \b
    labsupport sweep --seqlen 512,1024,2048,4096 --no-grad --chart time.png
    labsupport sweep --batch 1,4 --backends sdpa_flash,standard --csv rows.csv
    """
    from labsupport.profiling.grids import DIRECTIONS, grid, run_grid
    from labsupport.profiling.shapes import dtype_named, listed, measurable_backends
    from labsupport.profiling.tables import format_table
    from labsupport.profiling.timing import resolve_device

    if chart is not None and chart.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{chart}: a chart's name ends in .png, .svg or .pdf")
    where = resolve_device(device)
    cases = grid(
        measurable_backends(where) if backends is None else listed(backends, str),
        listed(seqlen, int),
        batch=listed(batch, int),
        heads=listed(nheads, int),
        kv_heads=listed(kv_heads, int),
        head_dim=listed(headdim, int),
        dtype=dtype_named(dtype, where),
        causal=causal,
        direction=DIRECTIONS[0] if no_grad else DIRECTIONS[1],
    )
    bounds = {"max_seconds": max_seconds, "repeats": repeats}
    table = run_grid(cases, device=where, measure_error=errors, progress=not quiet, **bounds)
    options.show_table(format_table(table), table, to_json, to_csv)
    if chart is not None and len(table):
        for path in write_charts(table, chart):
            typer.echo(f"chart: {path}", err=True)
    if table.attrs["provenance"].get("interrupted"):
        typer.echo(f"stopped: {len(table)} of {len(cases)} cases were measured", err=True)
        raise typer.Exit(interrupted_status())


def write_charts(table: pd.DataFrame, path: Path) -> list[Path]:
    """Draw time against length, one file for each shape among the rows; return the files.

    One shape's file is `path`; of several, each name says what is its own: sweep-batch2-heads8.png.
    """
    from labsupport.plotting import plot_time

    varying = [name for name in FIXED if table[name].nunique() > 1]
    groups: Any = table.groupby(varying, sort=False) if varying else [((), table)]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for values, rows in groups:
        if not (rows["status"] == "ok").any():
            continue
        own = "".join(f"-{name}{value}" for name, value in zip(varying, values, strict=True))
        rows.attrs = dict(table.attrs)
        written.append(path.with_name(f"{path.stem}{own}{path.suffix}"))
        plot_time(rows, title=finding(rows)).savefig(written[-1])
    return written


def finding(rows: pd.DataFrame) -> str:
    """Return a chart's title: the fastest backend at the longest length, and its lead."""
    from labsupport.profiling.units import format_ms

    ran = rows[rows["status"] == "ok"]
    ran = ran[ran["seqlen"] == ran["seqlen"].max()].sort_values("median_ms")
    first, last = ran.iloc[0], ran.iloc[-1]
    at = f"at {first['seqlen']} tokens"
    if len(ran) == 1:
        return f"{first['backend']} takes {format_ms(first['median_ms'])} ms {at}"
    times = last["median_ms"] / first["median_ms"]
    return f"{first['backend']} is {times:.1f} times as fast as {last['backend']} {at}"
