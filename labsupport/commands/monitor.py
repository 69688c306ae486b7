"""The command `labsupport monitor`."""

from pathlib import Path
from typing import Annotated

import typer


def monitor_command(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments, after --.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds between samples (0.1), or between refreshes of --live (1)."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show GPU and machine now; without a program, only that.")
    ] = False,
    count: Annotated[
        int | None, typer.Option(help="End --live without a program after so many refreshes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A CSV file, written while the program runs.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="The curve, as .png, .svg or .pdf, written at the end.")
    ] = None,
    device: Annotated[int, typer.Option(help="The GPU, as PyTorch counts.")] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds that the program has to end after Control-C.")
    ] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files.")] = False,
) -> None:
    """Run a program and sample its memory, that of its children and of the GPU.

    What the program leaves running is ended with it. The exit status is the program's.
    """
    from labsupport.profiling.monitoring.live import LIVE_INTERVAL_S, watch
    from labsupport.profiling.monitoring.run import run_monitored
    from labsupport.profiling.monitoring.sampler import DEFAULT_INTERVAL_S

    refresh = LIVE_INTERVAL_S if interval is None else interval
    if count is not None and (command or not live):
        raise ValueError("--count goes with --live, and without a program")
    if not command:
        if not live:
            raise ValueError("which program? monitor -- COMMAND, or monitor --live without one")
        if out is not None or chart is not None:
            raise ValueError("--out and --chart record a program: give one after --")
        raise typer.Exit(watch(refresh, count))
    samples = DEFAULT_INTERVAL_S if interval is None else interval
    raise typer.Exit(
        run_monitored(
            command,
            # A view may be renewed seldom; a peak of memory would be missed.
            interval=min(samples, DEFAULT_INTERVAL_S) if live else samples,
            out=out,
            chart=chart,
            device=device,
            grace=grace,
            force=force,
            live=refresh if live else None,
        )
    )
