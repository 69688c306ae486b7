"""The command `labsupport bench`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labsupport.commands.grid_options import (
    CSV,
    DEVICE,
    DTYPE,
    JSON,
    NO_GRAD,
    OVERWRITE,
    PRESET,
    SAVE,
    keep_table,
)
from labsupport.interrupt import interrupted_status

Option = typer.Option


def bench_command(
    batch: Annotated[int | None, Option(help="Sequences. Default: 2.")] = None,
    seqlen: Annotated[int | None, Option(help="Tokens in each. Default: 1024.")] = None,
    nheads: Annotated[int | None, Option(help="Query heads. Default: 8.")] = None,
    headdim: Annotated[int | None, Option(help="Numbers in a head's vectors. Default: 64.")] = None,
    causal: Annotated[
        bool | None, Option("--causal/--no-causal", help="Hide the future. Default: no.")
    ] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    repeats: Annotated[
        int | None, Option(min=1, help="Exactly so many. Default: until the median is known to 2%.")
    ] = None,
    no_grad: Annotated[bool, NO_GRAD] = False,
    backend: Annotated[str, Option(help="A name from `labsupport compare`.")] = "auto",
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: as --nheads.")] = None,
    preset: Annotated[str | None, PRESET] = None,
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
    device: Annotated[str | None, DEVICE] = None,
    to_json: Annotated[str | None, JSON] = None,
    to_csv: Annotated[Path | None, CSV] = None,
    save: Annotated[str | None, SAVE] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
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

    from labsupport.profiling.bench.one import report, run_bench
    from labsupport.profiling.bench.request import one_case
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
    keep_table(table, to_json, to_csv, save, overwrite)
    if not ran:
        interrupted = table.attrs["provenance"].get("interrupted")
        raise typer.Exit(interrupted_status() if interrupted else 1)


def _check(path: Path, tolerance: float) -> int:
    """Check a baseline, say the verdict, and return the exit status."""
    from labsupport.profiling.baseline import NotComparableError, check_baseline, read_baseline
    from labsupport.profiling.bench.one import headline

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
