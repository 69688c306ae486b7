"""The command `labsupport profile`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from labsupport.commands import grid_options as options
from labsupport.interrupt import interrupted_status

Option = typer.Option


def profile_command(
    out: Annotated[
        Path | None, Option(help="The folder to write. Default: profile-DATE-TIME here.")
    ] = None,
    preset: options.Preset = None,
    batch: options.Batch = None,
    seqlen: options.Seqlen = None,
    nheads: options.Nheads = None,
    kv_heads: options.KvHeads = None,
    headdim: options.Headdim = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    no_grad: options.NoGrad = False,
    backend: Annotated[
        str | None, Option(help="a,b: compared with `standard`. Default: all that run.")
    ] = None,
    device: options.Device = None,
    seconds: options.MaxSeconds = 2.0,
    nsight: Annotated[
        bool, Option("--nsight/--no-nsight", help="Use Nsight Systems and Compute if installed.")
    ] = True,
) -> None:
    """Profile a shape of attention, and write the results to a folder.

    Open its SUMMARY.md first. If the command ends early, the results so far are there, and the
    summary says what is missing.

    \b
    labsupport profile --preset gpt2-small --out gpt2
    labsupport profile --seqlen 4096 --causal --backend sdpa_flash,flash_torch
    """
    from labsupport.analysis.profile import profile_attention
    from labsupport.profiling.bench import listed, measurable_backends, one_case
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    shape: dict[str, Any] = {"preset": preset, "dtype": dtype, "grad": not no_grad}
    shape |= {"batch": batch, "seqlen": seqlen, "heads": nheads, "head_dim": headdim}
    shape |= {"causal": causal, "kv_heads": kv_heads}
    names = listed(backend, str) if backend else measurable_backends(where)
    names = list(dict.fromkeys(["standard", *names]))
    case, *_ = [one_case(where, backend=name, **shape) for name in names]  # refuses unknown names
    folder = out or Path(f"profile-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another name with --out")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        summary = profile_attention(folder, case, names, where, seconds=seconds, use_nsight=nsight)
    except KeyboardInterrupt:
        raise typer.Exit(interrupted_status()) from None
    typer.echo(f"open: {folder / 'SUMMARY.md'}")
    raise typer.Exit(int(summary.failed))
