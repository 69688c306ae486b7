"""The command `labsupport sweep`: PyTorch is imported when it runs, not with this file."""

from pathlib import Path
from typing import Annotated

import typer

from labsupport.commands import grid_options as options
from labsupport.interrupt import interrupted_status

Option = typer.Option


def sweep_command(
    seqlen: Annotated[str, Option(help="Lengths, with commas.")] = "512,1024,2048",
    batch: Annotated[str, Option(help="Batches, with commas.")] = "2",
    nheads: Annotated[str, Option(help="Query heads, with commas.")] = "8",
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
    from labsupport.profiling.bench import dtype_named, listed, measurable_backends, write_charts
    from labsupport.profiling.benchmark import run_grid
    from labsupport.profiling.cases import DIRECTIONS, grid
    from labsupport.profiling.tables import format_table
    from labsupport.profiling.timing import resolve_device

    options.check_chart(chart)
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
    text = format_table(table) if len(table) else "nothing was measured"
    options.show_table(text, table, to_json, to_csv)
    if chart is not None and len(table):
        for path in write_charts(table, chart):
            typer.echo(f"chart: {path}", err=True)
    if table.attrs["provenance"].get("interrupted"):
        typer.echo(f"stopped: {len(table)} of {len(cases)} cases were measured", err=True)
        raise typer.Exit(interrupted_status())
