"""A whole Python program under torch.profiler, without a change to it.

python -m labsupport.profiling.trace.run --out FOLDER -- script.py ARGUMENTS
python -m labsupport.profiling.trace.run --out FOLDER -- -m module ARGUMENTS
python -m labsupport.profiling.trace.run --out FOLDER -- -c 'code' ARGUMENTS

The program runs in this process as Python itself would run it: its arguments, its folder, its exit
status. What other threads of it do is not seen. A trace grows with each operator, by megabytes a
second and more, so only some seconds are recorded: from --after on, for --seconds at most. The
profiler can only be stopped by the thread that started it, so another thread keeps the time and
interrupts the first one, as a signal would, between two steps of Python.

In the folder: trace.json.gz, kernels.csv, memory.csv, and note.json, which says how it went.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from labsupport.interrupt import interrupted_status
from labsupport.profiling.trace.export import whole_file, write_text
from labsupport.profiling.trace.recorder import Trace, new_profiler

RECORD_S = 10.0
NAMES = ("trace.json.gz", "kernels.csv", "memory.csv", "note.json")
_ALARM = getattr(signal, "SIGVTALRM", signal.SIGTERM)  # hardly any program has a use for it


class Recording:
    """A profiler that starts and stops by the clock while a program runs in the main thread."""

    def __init__(self, folder: Path, after: float, seconds: float) -> None:
        self._folder, self._after, self._seconds = folder, after, seconds
        self._gpu = torch.cuda.is_available()
        self._profiler: torch.profiler.profile | None = None
        self._running = False
        self._ended = threading.Event()
        self._began = self._from = time.perf_counter()
        self.note: dict[str, Any] = {
            "device": "cuda" if self._gpu else "cpu",
            "from_s": None,
            "recorded_s": 0.0,
            "stopped_by": "the end of the program",
            "cut": False,
            "ended_s": None,  # the program, in seconds of this process
            "problem": "",
        }

    def begin(self) -> None:
        """Start the profiler now or, later, the thread that will have it started."""
        signal.signal(_ALARM, self._on_alarm)
        for name in NAMES:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        with new_profiler(self._gpu):
            pass  # the first one takes seconds to set itself up, and they are not the program's
        if self._after <= 0:
            self._start()
        self._began = time.perf_counter()
        threading.Thread(target=self._keep_time, daemon=True).start()

    def end(self) -> None:
        """Stop, and write the files; what cannot be written is named in the note."""
        self._ended.set()
        signal.signal(_ALARM, signal.SIG_IGN)
        self.note["ended_s"] = round(time.time() - psutil.Process().create_time(), 3)
        self._stop()
        if self._profiler is None and not self.note["problem"]:
            self.note["problem"] = f"the program ended before --after {self._after:g} s"
        if self._profiler is not None:
            seen = Trace(self._profiler, torch.device(self.note["device"]))
            _kept(self.note, lambda: seen.save(self._folder / NAMES[0]))
            _kept(self.note, lambda: _save_table(seen.kernels(), self._folder / NAMES[1]))
            _kept(self.note, lambda: _save_table(seen.memory(), self._folder / NAMES[2]))
        _kept(self.note, lambda: write_text(self._folder / NAMES[3], json.dumps(self.note)))

    def _keep_time(self) -> None:
        moments = [self._after] if self._after > 0 else []
        for moment in (*moments, max(0.0, self._after) + self._seconds):
            if self._ended.wait(max(0.0, self._began + moment - time.perf_counter())):
                return
            _thread.interrupt_main(_ALARM)

    def _on_alarm(self, number: int, frame: types.FrameType | None) -> None:
        if self._running:
            self.note["cut"] = True
            self.note["stopped_by"] = f"its limit of {self._seconds:g} s"
            self._stop()
        elif self._profiler is None:
            self._start()

    def _start(self) -> None:
        try:
            self._profiler = new_profiler(self._gpu)
            self._profiler.start()
        except Exception as error:  # the program uses the profiler itself
            self._profiler = None
            self.note["problem"] = f"torch.profiler did not start: {error}"
            return
        self._running = True
        self._from = time.perf_counter()
        self.note["from_s"] = max(0.0, self._after)

    def _stop(self) -> None:
        if not self._running or self._profiler is None:
            return
        self._running = False
        self.note["recorded_s"] = round(time.perf_counter() - self._from, 3)
        try:
            if self._gpu:
                torch.cuda.synchronize()
            self._profiler.stop()
        except Exception as error:
            self._profiler = None
            self.note["problem"] = f"torch.profiler did not stop: {error}"


def _save_table(table: Any, path: Path) -> None:
    with whole_file(path) as part:
        table.to_csv(part, index=False)


def _kept(note: dict[str, Any], write: Callable[[], Any]) -> None:
    try:
        write()
    except Exception as error:  # the program's own status is what counts
        note["problem"] = "; ".join(filter(None, [note["problem"], " ".join(str(error).split())]))


def run_program(program: Sequence[str]) -> int:
    """Run `script.py ...`, `-m module ...` or `-c code ...` here; returns its exit status.

    An error is printed with its traceback, as Python prints it, without our own frames.
    """
    try:
        _execute(list(program))
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trail = error.__traceback__
        while trail is not None and trail.tb_frame.f_code.co_filename in _OURS:
            trail = trail.tb_next
        traceback.print_exception(type(error), error, trail)
        return interrupted_status() if isinstance(error, KeyboardInterrupt) else 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    return 0


_OURS = {__file__, runpy.__file__, "<frozen runpy>"}


def _execute(program: list[str]) -> None:
    kind = program[0]
    if kind == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *program[2:]]
        sys.path[0] = ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(program[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = program
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program named behind `--`; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.profiling.trace.run",
        description="Run a Python program under torch.profiler: options, then -- and the program.",
    )
    parser.add_argument("--out", type=Path, required=True, help="an existing folder")
    parser.add_argument("--after", type=float, default=0.0, help="seconds without recording first")
    parser.add_argument("--seconds", type=float, default=RECORD_S, help="recorded at most")
    options = parser.parse_args(given[:cut])
    program = given[cut + 1 :]
    if not program or (program[0] in ("-m", "-c") and len(program) < 2):
        parser.error("name a program behind --: script.py, -m module or -c code")
    recording = Recording(options.out.absolute(), options.after, options.seconds)
    recording.begin()
    try:
        return run_program(program)
    finally:
        recording.end()


if __name__ == "__main__":
    sys.exit(main())
