"""The commands `labsupport bench`, `sweep` and `compare`: PyTorch is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labsupport.interrupt import interrupted_status

if TYPE_CHECKING:
    import pandas as pd

Option = typer.Option

_DEVICE = Option(help="cpu or cuda. Default: the GPU, if any.")
_DTYPE = Option(help="fp16, bf16, fp32 or PyTorch's names. Default: bf16 on GPUs, fp32 on CPUs.")
_PRESET = Option(help="A model's shape: --list-presets says which. Options beside it win.")
_JSON = Option("--json", help="Write all as JSON to this file; - is the terminal.")
_CSV = Option("--csv", help="Write the rows as CSV to this file.")


def _run_name(name: str | None) -> str | None:
    """Refuse a bad name before anything is measured."""
    from labsupport.profiling.runs import check_run_name

    if name is not None:
        check_run_name(name)
    return name


_SAVE = Option(callback=_run_name, help="Keep the table under data/runs/SAVE, with its provenance.")
_OVERWRITE = Option("--overwrite", help="Replace a run of that name.")
_NO_GRAD = Option("--no-grad", help="The forward pass alone. Default: with the backward pass.")


def bench_command(
    batch: Annotated[int | None, Option(help="Sequences. Default: 2.")] = None,
    seqlen: Annotated[int | None, Option(help="Tokens in each. Default: 1024.")] = None,
    nheads: Annotated[int | None, Option(help="Query heads. Default: 8.")] = None,
    headdim: Annotated[int | None, Option(help="Numbers in a head's vectors. Default: 64.")] = None,
    causal: Annotated[
        bool | None, Option("--causal/--no-causal", help="Hide the future. Default: no.")
    ] = None,
    dtype: Annotated[str | None, _DTYPE] = None,
    repeats: Annotated[
        int | None, Option(min=1, help="Exactly so many. Default: until the median is known to 2%.")
    ] = None,
    no_grad: Annotated[bool, _NO_GRAD] = False,
    backend: Annotated[str, Option(help="A name from `labsupport compare`.")] = "auto",
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: as --nheads.")] = None,
    preset: Annotated[str | None, _PRESET] = None,
    list_presets: Annotated[bool, Option("--list-presets", help="Say the presets.")] = False,
    save_baseline: Annotated[
        Path | None, Option(help="Keep how long this case takes in a file, for later checks.")
    ] = None,
    check_baseline: Annotated[
        Path | None,
        Option(help="Measure the file's case again: status 1 if slower, 3 if one cannot tell."),
    ] = None,
    tolerance: Annotated[
        str, Option(help="Slower than this is an alarm; twice this is caught.")
    ] = "5%",
    device: Annotated[str | None, _DEVICE] = None,
    to_json: Annotated[str | None, _JSON] = None,
    to_csv: Annotated[Path | None, _CSV] = None,
    save: Annotated[str | None, _SAVE] = None,
    overwrite: Annotated[bool, _OVERWRITE] = False,
) -> None:
    """Measure one attention call: time, speed, memory, and how far from this device's ceilings.

    \b
    labsupport bench --seqlen 4096 --causal --no-grad
    labsupport bench --preset gpt2-small --backend sdpa_flash --json -
    labsupport bench --no-grad --save-baseline flash.json
    labsupport bench --check-baseline flash.json
    """
    if list_presets:
        from labsupport.profiling.presets import describe_presets

        typer.echo(describe_presets())
        return
    if check_baseline is not None:
        if save_baseline is not None:
            raise ValueError("--save-baseline and --check-baseline: one at a time")
        raise typer.Exit(_check(check_baseline, _fraction(tolerance)))

    from labsupport.profiling.bench_command.bench import report, run_bench
    from labsupport.profiling.bench_command.request import one_case
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    case = one_case(
        where,
        backend=backend,
        preset=preset,
        dtype=dtype,
        grad=not no_grad,
        batch=batch,
        seqlen=seqlen,
        heads=nheads,
        head_dim=headdim,
        causal=causal,
        kv_heads=kv_heads,
    )
    if save_baseline is not None:
        from labsupport.profiling.baseline import make_baseline, write_baseline

        made = make_baseline(case, str(where), tolerance=_fraction(tolerance), say=typer.echo)
        write_baseline(made, save_baseline)
        typer.echo(f"saved: {save_baseline} ({len(made.log_ratios)} processes)")
        return
    table = run_bench(case, where, repeats=repeats)
    ran = len(table) == 1 and table["status"].iloc[0] == "ok"
    ceilings = measured_ceilings(str(where)) if ran else None
    lines = report(table, case, where, ceilings)
    typer.echo("\n".join(lines), err=to_json == "-")
    _keep(table, to_json, to_csv, save, overwrite)
    if not ran:
        interrupted = table.attrs["provenance"].get("interrupted")
        raise typer.Exit(interrupted_status() if interrupted else 1)


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
    dtype: Annotated[str | None, _DTYPE] = None,
    no_grad: Annotated[bool, _NO_GRAD] = False,
    repeats: Annotated[int | None, Option(min=1, help="Of each case, exactly.")] = None,
    max_seconds: Annotated[float, Option(help="For the repeats of a case.")] = 1.0,
    errors: Annotated[bool, Option("--errors", help="Compare outputs with float64, too.")] = False,
    chart: Annotated[
        Path | None, Option(help="Time against length, as .png, .svg or .pdf; one for each shape.")
    ] = None,
    device: Annotated[str | None, _DEVICE] = None,
    quiet: Annotated[bool, Option("--quiet", help="No progress bar.")] = False,
    to_json: Annotated[str | None, _JSON] = None,
    to_csv: Annotated[Path | None, _CSV] = None,
    save: Annotated[str | None, _SAVE] = None,
    overwrite: Annotated[bool, _OVERWRITE] = False,
) -> None:
    """Measure many cases: lengths, batches, heads, backends. Control-C keeps what was measured.

    \b
    labsupport sweep --seqlen 512,1024,2048,4096 --no-grad --chart time.png
    labsupport sweep --batch 1,4 --backends sdpa_flash,standard --csv rows.csv
    """
    from labsupport.profiling.bench_command.request import dtype_named, listed, measurable_backends
    from labsupport.profiling.bench_command.sweep import check_chart, write_charts
    from labsupport.profiling.benchmark import run_grid
    from labsupport.profiling.benchmark_command import format_table
    from labsupport.profiling.cases import DIRECTIONS, grid
    from labsupport.profiling.timing import resolve_device

    check_chart(chart)
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
    table = run_grid(
        cases,
        device=where,
        measure_error=errors,
        max_seconds=max_seconds,
        repeats=repeats,
        progress=not quiet,
    )
    interrupted = bool(table.attrs["provenance"].get("interrupted"))
    if len(table):
        typer.echo(format_table(table), err=to_json == "-")
    if interrupted:
        typer.echo(f"stopped: {len(table)} of {len(cases)} cases were measured", err=True)
    _keep(table, to_json, to_csv, save, overwrite)
    if chart is not None:
        for path in write_charts(table, chart):
            typer.echo(f"chart: {path}", err=True)
    if interrupted:
        raise typer.Exit(interrupted_status())


def compare_command(
    batch: Annotated[int | None, Option(help="Sequences. Default: 2.")] = None,
    seqlen: Annotated[int | None, Option(help="Tokens in each. Default: 1024.")] = None,
    nheads: Annotated[int | None, Option(help="Query heads. Default: 8.")] = None,
    headdim: Annotated[int | None, Option(help="Default: 64.")] = None,
    causal: Annotated[
        bool | None, Option("--causal/--no-causal", help="Hide the future. Default: no.")
    ] = None,
    dtype: Annotated[str | None, _DTYPE] = None,
    no_grad: Annotated[bool, _NO_GRAD] = False,
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: as --nheads.")] = None,
    preset: Annotated[str | None, _PRESET] = None,
    max_seconds: Annotated[float, Option(help="For the repeats of each.")] = 1.0,
    device: Annotated[str | None, _DEVICE] = None,
    to_json: Annotated[str | None, _JSON] = None,
    to_csv: Annotated[Path | None, _CSV] = None,
    save: Annotated[str | None, _SAVE] = None,
    overwrite: Annotated[bool, _OVERWRITE] = False,
) -> None:
    """Compare all implementations that run here: the fastest, the leanest, and what to do next.

    of ceiling: of what this device's own matrix products and copies reach, measured just now.
    good: half of it or more; fair: a quarter.

    \b
    labsupport compare --seqlen 2048 --causal --no-grad
    labsupport compare --preset long-8k --no-grad --csv table.csv
    """
    from dataclasses import asdict

    from labsupport.profiling.bench_command.compare import report, run_compare
    from labsupport.profiling.bench_command.request import one_case
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    case = one_case(
        where,
        backend="standard",
        preset=preset,
        dtype=dtype,
        grad=not no_grad,
        batch=batch,
        seqlen=seqlen,
        heads=nheads,
        head_dim=headdim,
        causal=causal,
        kv_heads=kv_heads,
    )
    ceilings = measured_ceilings(str(where))
    table = run_compare(case, where, ceilings, max_seconds=max_seconds)
    typer.echo("\n".join(report(table, case, ceilings)), err=to_json == "-")
    _keep(table, to_json, to_csv, save, overwrite, ceilings=asdict(ceilings))


def _keep(
    table: pd.DataFrame,
    to_json: str | None,
    to_csv: Path | None,
    save: str | None,
    overwrite: bool,
    **further: object,
) -> None:
    from labsupport.profiling.bench_command.export import export
    from labsupport.profiling.runs import keep_run

    export(table, to_json=to_json, to_csv=to_csv, **further)
    if save is not None:
        typer.echo(keep_run(table, save, overwrite=overwrite), err=True)


def _check(path: Path, tolerance: float) -> int:
    """Check a baseline, say the verdict, and return the exit status."""
    from labsupport.profiling.baseline import NotComparableError, check_baseline, read_baseline
    from labsupport.profiling.bench_command.bench import headline

    baseline = read_baseline(path)
    typer.echo(headline(baseline.job.case))
    try:
        verdict = check_baseline(baseline, tolerance=tolerance, say=typer.echo)
    except NotComparableError as error:
        typer.echo(f"cannot tell: {error}", err=True)
        return 3
    typer.echo(str(verdict))
    return verdict.exit_status


def _fraction(text: str) -> float:
    """'5%' and '0.05' as 0.05.

    Raises:
        ValueError: no number, or one that is not between 0 and 1.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ValueError(f"--tolerance {text!r}: a share such as 5% or 0.05 is expected")
    return value
