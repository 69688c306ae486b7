"""The command `labsupport profile`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from labsupport.interrupt import interrupted_status

Option = typer.Option


def profile_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A program and its arguments, after --, in place of a shape."),
    ] = None,
    out: Annotated[
        Path | None, Option(help="The folder to write. Default: profile-DATE-TIME here.")
    ] = None,
    preset: Annotated[
        str | None, Option(help="A shape by name, as `labsupport bench --preset` takes it.")
    ] = None,
    batch: Annotated[int | None, Option(help="Default: 2.")] = None,
    seqlen: Annotated[int | None, Option(help="Tokens. Default: 1024.")] = None,
    nheads: Annotated[int | None, Option(help="Query heads. Default: 8.")] = None,
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: one a head.")] = None,
    headdim: Annotated[int | None, Option(help="Default: 64.")] = None,
    causal: Annotated[bool | None, Option("--causal/--no-causal", help="Default: no.")] = None,
    dtype: Annotated[
        str | None, Option(help="fp16, bf16, fp32 or PyTorch's names. Default: bf16, on CPUs fp32.")
    ] = None,
    no_grad: Annotated[
        bool, Option("--no-grad", help="The forward pass alone. Default: with the backward pass.")
    ] = False,
    backend: Annotated[
        str | None, Option(help="a,b: beside the baseline `standard`. Default: all that run.")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")] = None,
    seconds: Annotated[float, Option(help="For the repeats of each backend.")] = 2.0,
    nsight: Annotated[
        bool, Option("--nsight/--no-nsight", help="Use Nsight Systems and Compute if installed.")
    ] = True,
    tracer: Annotated[
        str, Option(help="Of a program: auto, torch, nsys, none. It runs once, under one of them.")
    ] = "auto",
    trace_after: Annotated[float, Option(help="Seconds of a program that are not recorded.")] = 0.0,
    trace_seconds: Annotated[float, Option(help="Seconds of it that are recorded.")] = 10.0,
    force: Annotated[
        bool, Option("--force", help="Write into a folder that is not empty.")
    ] = False,
) -> None:
    """Profile a shape of attention, or a program, into a folder.

    Open SUMMARY.md in it first. If the command ends early, it keeps what it has gathered, and the
    summary says what is missing. The command ends with the program's exit status.

    \b
    labsupport profile --preset gpt2-small --out gpt2
    labsupport profile --seqlen 4096 --causal --backend sdpa_flash,flash_torch
    labsupport profile --out generation -- labsupport generate --max-new-tokens 50
    """
    shape: dict[str, Any] = {
        "preset": preset,
        "batch": batch,
        "seqlen": seqlen,
        "heads": nheads,
        "kv_heads": kv_heads,
        "head_dim": headdim,
        "causal": causal,
        "dtype": dtype,
    }
    if command and (backend or any(value is not None for value in shape.values())):
        raise ValueError("give a shape and its backends, or a program after --, not both")
    if trace_seconds <= 0:
        raise ValueError(f"--trace-seconds is {trace_seconds:g}; it must be more than 0")
    from labsupport.analysis.profile import TRACERS, profile_attention, profile_program
    from labsupport.profiling.bench import listed, measurable_backends, one_case
    from labsupport.profiling.timing import resolve_device

    if tracer not in TRACERS:
        raise ValueError(f"--tracer {tracer}: choose one of {', '.join(TRACERS)}")
    where, status = resolve_device(device), 0
    try:
        if command:
            summary, status = profile_program(
                _folder(out, force), command, where,
                tracer=tracer, after=trace_after, seconds=trace_seconds,
            )  # fmt: skip
        else:
            case = one_case(where, backend="standard", grad=not no_grad, **shape)
            names = listed(backend, str) if backend else measurable_backends(where)
            names = list(dict.fromkeys(["standard", *names]))
            for name in names:
                one_case(where, backend=name, grad=not no_grad, **shape)  # refuses unknown names
            summary = profile_attention(
                _folder(out, force), case, names, where, seconds=seconds, use_nsight=nsight
            )
    except KeyboardInterrupt:
        raise typer.Exit(interrupted_status()) from None
    typer.echo(f"open: {summary.folder / 'SUMMARY.md'}")
    raise typer.Exit(status or int(summary.failed))


def _folder(out: Path | None, force: bool) -> Path:
    out = out or Path(f"profile-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file: name a folder with --out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise FileExistsError(
            f"{out} is not empty: choose another name, or write over with --force"
        )
    out.mkdir(parents=True, exist_ok=True)
    return out
