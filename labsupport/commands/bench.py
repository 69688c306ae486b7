"""The command `labsupport bench`: PyTorch is imported when it runs, not with this file."""

from pathlib import Path
from typing import Annotated

import typer

from labsupport.commands import grid_options as options
from labsupport.interrupt import interrupted_status

Option = typer.Option


def bench_command(
    batch: options.Batch = None,
    seqlen: options.Seqlen = None,
    nheads: options.Nheads = None,
    headdim: options.Headdim = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    repeats: options.Repeats = None,
    no_grad: options.NoGrad = False,
    backend: Annotated[str, Option(help="A name from `labsupport compare`.")] = "auto",
    kv_heads: options.KvHeads = None,
    preset: options.Preset = None,
    list_presets: Annotated[bool, Option("--list-presets", help="Print the presets.")] = False,
    save_baseline: Annotated[
        Path | None, Option(help="Save this case's time to a file, for later checks.")
    ] = None,
    check_baseline: Annotated[
        Path | None,
        Option(help="Measure the file's case again: exit status 1 if slower, 3 if undecided."),
    ] = None,
    tolerance: Annotated[
        float,
        Option(min=0.001, max=1, help="Slowdown that counts; twice as much is found reliably."),
    ] = 0.05,
    device: options.Device = None,
    to_json: options.Json = None,
    to_csv: options.Csv = None,
) -> None:
    """Measure one attention call: time, speed, memory, and share of this device's ceilings.

    \b
    labsupport bench --seqlen 4096 --causal --no-grad
    labsupport bench --preset gpt2-small --backend sdpa_flash --json -
    labsupport bench --no-grad --save-baseline flash.json
    labsupport bench --check-baseline flash.json
    """
    if list_presets:
        from labsupport.profiling.bench import describe_presets

        typer.echo(describe_presets())
        return
    if check_baseline is not None:
        if save_baseline is not None:
            raise ValueError("--save-baseline and --check-baseline: one at a time")
        raise typer.Exit(_check(check_baseline, tolerance))

    from labsupport.profiling.bench import bench_report, one_case
    from labsupport.profiling.benchmark import run_grid
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    shape = {"batch": batch, "seqlen": seqlen, "heads": nheads, "head_dim": headdim}
    shape |= {"causal": causal, "kv_heads": kv_heads}
    case = one_case(where, backend=backend, preset=preset, dtype=dtype, grad=not no_grad, **shape)
    if save_baseline is not None:
        from labsupport.profiling.baseline import make_baseline, plan, write_baseline

        write_baseline(make_baseline(plan(case, str(where)), typer.echo), save_baseline)
        typer.echo(f"saved: {save_baseline}")
        return
    bounds = {"max_seconds": 2.0, "repeats": repeats}
    table = run_grid([case], device=where, measure_error=False, progress=False, **bounds)
    for name, column in (("peak_tflops", "min_ms"), ("average_tflops", "mean_ms")):
        table[name] = case.flops() / table[column].astype(float) / 1e9
    ran = table["status"].tolist() == ["ok"]
    text = bench_report(table, case, where, measured_ceilings(str(where)) if ran else None)
    options.show_table(text, table, to_json, to_csv)
    if not ran:
        interrupted = table.attrs["provenance"].get("interrupted")
        raise typer.Exit(interrupted_status() if interrupted else 1)


def _check(path: Path, tolerance: float) -> int:
    """Check a baseline, print the verdict, and return the exit status."""
    from labsupport.profiling.baseline import EXIT_STATUS, check_baseline, read_baseline
    from labsupport.profiling.bench import headline

    baseline = read_baseline(path)
    typer.echo(headline(baseline.job.case))
    try:
        verdict = check_baseline(baseline, tolerance, typer.echo)
    except ValueError as error:  # another device
        typer.echo(f"cannot tell: {error}", err=True)
        return EXIT_STATUS["cannot tell"]
    typer.echo(str(verdict))
    return EXIT_STATUS[verdict.word]
