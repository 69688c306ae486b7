"""The command `labsupport profile`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labsupport.interrupt import interrupted_status

if TYPE_CHECKING:
    from labsupport.analysis.profile.report import Report
    from labsupport.profiling.cases import Case

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
    """Measure all that can be measured of a shape, or of a program, into a folder.

    Open SUMMARY.md in it first. Whatever ends the command early, what was gathered is kept, and the
    summary says what is missing. A program's exit status is the command's.

    \b
    labsupport profile --preset gpt2-small --out gpt2
    labsupport profile --seqlen 4096 --causal --backend sdpa_flash,flash_torch
    labsupport profile --out generation -- labsupport generate --max-new-tokens 50
    """
    shape: dict[str, Any] = {
        "preset": preset,
        "batch": batch,
        "seqlen": seqlen,
        "nheads": nheads,
        "kv_heads": kv_heads,
        "headdim": headdim,
        "causal": causal,
        "dtype": dtype,
        "backend": backend,
    }
    if command and (given := [name for name, value in shape.items() if value is not None]):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{named} describe a shape: leave them away, or leave the program away")
    if trace_seconds <= 0:
        raise ValueError(f"--trace-seconds is {trace_seconds:g}; it must be more than 0")
    from labsupport.analysis.profile.program_plan import TRACERS

    if tracer not in TRACERS:
        raise ValueError(f"--tracer {tracer}: choose one of {', '.join(TRACERS)}")
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    if command:
        folder = _folder(out, force)
        options = {"tracer": tracer, "after": trace_after, "seconds": trace_seconds}
        report, status = _profile_program(folder, command, where, options)
    else:
        from labsupport.profiling.bench.request import one_case

        case = one_case(
            where,
            backend="standard",
            preset=preset,
            dtype=dtype,
            grad=not no_grad,
            batch=batch,
            seqlen=seqlen,
            heads=nheads,
            kv_heads=kv_heads,
            head_dim=headdim,
            causal=causal,
        )
        names = _backends(backend, where)
        folder = _folder(out, force)
        report, status = _profile_shape(folder, case, names, where, seconds, nsight)
    raise typer.Exit(_tell(report, status))


def _profile_shape(
    folder: Path, case: Case, backends: list[str], device: Any, seconds: float, nsight: bool
) -> tuple[Report, int]:
    from labsupport.analysis.profile import nsight as tools
    from labsupport.analysis.profile import steps, steps_traces
    from labsupport.analysis.profile.report import Report, ended_gently
    from labsupport.analysis.profile.wording import shape_words

    title = f"Profile of attention: {shape_words(case)}"
    report = Report(folder, title, _opening(), steps.SECTIONS, _say)
    work = steps.Work(report, case, backends, device, seconds, nsight)
    _note_absent(report, backends, device)
    with ended_gently(report):
        try:
            for key, step in {
                "machine": steps.describe_machine,
                "comparison": steps.compare,
                "kernels": steps_traces.look_at_kernels,
                "memory": steps_traces.draw_memory,
                "bandwidth": steps_traces.judge_bandwidth,
                "timelines": steps_traces.explain_timelines,
                "nsys": tools.run_nsys,
                "ncu": tools.run_ncu,
            }.items():
                report.step(key, lambda section, step=step: step(work, section))
        except KeyboardInterrupt:  # between two steps
            report.interrupted = report.interrupted or report.signal
        report.finish()
    return report, 0


def _profile_program(
    folder: Path, command: list[str], device: Any, options: dict[str, Any]
) -> tuple[Report, int]:
    from labsupport.analysis.profile import program as steps
    from labsupport.analysis.profile.program_plan import Run
    from labsupport.analysis.profile.report import Report, Section, ended_gently
    from labsupport.analysis.profile.steps import Work, describe_machine
    from labsupport.profiling.cases import Case

    title = f"Profile of a program: {Path(command[0]).name}"
    report = Report(folder, title, _opening(), steps.SECTIONS, _say)
    run = Run(report, command, gpu=device.type == "cuda", **options)
    work = Work(report, Case("standard", 1), [], device)

    def bandwidth(section: Section) -> None:
        steps.show_bandwidth(run, section, work.ceilings)

    with ended_gently(report):
        try:
            # The program comes first: what is measured of the machine would share it with the
            # program's GPU, and what is known about a program is lost with an interrupt.
            report.step("program", lambda section: steps.run_program(run, section))
            report.step("memory", lambda section: steps.show_memory(run, section))
            traced = {
                "torch": {"kernels": steps.show_kernels, "timelines": steps.show_timelines},
                "nsys": {"nsys": steps.show_nsys},
                "none": {},
            }
            for key in ("kernels", "timelines", "nsys"):
                report.sections[key].state = "skipped"  # said by the plan, in what is missing
            for key, step in traced[run.by].items():
                report.step(key, lambda section, step=step: step(run, section))
            report.step("machine", lambda section: describe_machine(work, section))
            report.step("bandwidth", bandwidth)
        except KeyboardInterrupt:
            report.interrupted = report.interrupted or report.signal
        steps.note_interrupt(run)
        report.finish()
    return report, run.status or 0


def _backends(asked: str | None, device: Any) -> list[str]:
    """The baseline, then those asked for, or all that run and are compiled."""
    from labsupport.attention.implementations import by_name
    from labsupport.profiling.bench.request import listed, measurable_backends

    names = measurable_backends(device) if asked is None else listed(asked, str)
    for name in names:
        by_name(name)  # refuses an unknown one before anything long begins
    return list(dict.fromkeys(["standard", *names]))


def _note_absent(report: Report, backends: list[str], device: Any) -> None:
    from labsupport.attention.backends import available_backends
    from labsupport.profiling.bench.request import measurable_backends

    measurable = measurable_backends(device)
    for one in available_backends(device=device):
        if one.name in backends:
            continue
        why = "; ".join(one.reasons)
        if not why:
            asked = one.name in measurable
            why = "it was not asked for" if asked else "interpreted here: to be read, not timed"
        report.lost(f"backend {one.name}", why)


def _folder(out: Path | None, force: bool) -> Path:
    if out is None:
        out = Path(f"profile-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file: name a folder with --out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise FileExistsError(
            f"{out} is not empty: choose another name, or write over with --force"
        )
    out.mkdir(parents=True, exist_ok=True)
    return out


def _opening() -> str:
    import sys

    given = sys.argv[1:]
    return f"`labsupport {shlex.join(given if given[:1] == ['profile'] else ['profile', *given])}`"


def _say(text: str) -> None:
    typer.echo(f"labsupport profile: {text}", err=True)


def _tell(report: Report, status: int) -> int:
    """The last words in the terminal, and the exit status."""
    from labsupport.analysis.profile.report import SUMMARY

    if report.unwritten:
        _say(f"SUMMARY.md could not be written ({report.unwritten}); so this is it:")
        typer.echo(report.text())
    for finding in report.short:
        typer.echo(finding.replace("**", "").replace("`", ""))
    if report.missing:
        _say(f"{len(report.missing)} things are missing; the summary says why")
    typer.echo(f"open: {report.folder / SUMMARY}")
    if report.interrupted:
        return status or interrupted_status()
    return status or int(report.failed)
