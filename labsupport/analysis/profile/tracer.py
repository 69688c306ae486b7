"""Run torch.profiler inside a Python program that knows nothing of it.

`labsupport profile -- PROGRAM` puts a `sitecustomize` on the program's path, which runs this file
when Python starts. So it imports nothing but PyTorch, and does nothing where that is missing.
Options come in LABSUPPORT_TRACE, as JSON: folder, after, seconds. Only the first Python process of
the program is traced, in its main thread and its backward passes.
"""

import atexit
import json
import os
import signal
import time
from pathlib import Path


def record(folder: Path, after: float, seconds: float) -> None:
    """Record from `after` seconds on, for `seconds` at most; write the files at the end.

    In the folder: trace.json.gz, kernels.txt (torch.profiler's table) and note.txt.
    """
    try:
        import torch
    except ImportError:
        return
    gpu = torch.cuda.is_available()
    with torch.profiler.profile():
        pass  # the first one takes long to start
    profiler = torch.profiler.profile(profile_memory=True, with_flops=True)
    started = stopped = 0.0

    def start() -> None:
        nonlocal started
        profiler.start()
        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop() -> None:
        nonlocal stopped
        signal.setitimer(signal.ITIMER_REAL, 0)
        if started and not stopped:
            stopped = time.perf_counter()
            profiler.stop()

    def write() -> None:
        stop()
        if not started:
            (folder / "note.txt").write_text(f"The program ended within {after:g} s: no trace.")
            return
        key = "self_device_time_total" if gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=100)
        (folder / "kernels.txt").write_text(table)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        note = f"Recorded: {stopped - started:.2f} s, from {after:g} s on."
        if gpu:
            note += f" PyTorch's memory at the peak: {torch.cuda.max_memory_allocated():,} bytes."
        (folder / "note.txt").write_text(note)

    signal.signal(signal.SIGALRM, lambda *_: stop() if started else start())
    atexit.register(write)
    if after > 0:
        signal.setitimer(signal.ITIMER_REAL, after)
    else:
        start()


if "LABSUPPORT_TRACE" in os.environ:
    options = json.loads(os.environ.pop("LABSUPPORT_TRACE"))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    record(Path(options["folder"]), options["after"], options["seconds"])
