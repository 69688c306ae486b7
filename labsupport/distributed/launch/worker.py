"""What runs inside each process of `launch`: find the target, call it, write down how it ended.

`launch` starts this file by its path, so that nothing large is imported before the process is tied
to the life of its launcher. In the run's folder each rank leaves one of

    result-RANK.pickle   what the function returned
    error-RANK.json      the exception, its traceback, and when it arrived here

and on SIGUSR1 it writes to stacks-RANK.txt where it is, even from within a collective.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

# What PyTorch's errors say when another rank is gone, or does not come.
_LOST = ("gloo", "nccl", "processgroup", "tcpstore", "connection closed", "connection reset")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(folder: Path, rank: int, launcher: int) -> int:
    """Run the job of `folder` as this rank; the process's exit code."""
    die_with(launcher)
    faulthandler.enable()
    stacks = (folder / f"stacks-{rank}.txt").open("w")
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        job = pickle.loads((folder / "job.pickle").read_bytes())
        result = run(job)
        write(folder / f"result-{rank}.pickle", pickle.dumps(result))
    except BaseException as error:
        flush()
        text = "".join(traceback.format_exception(type(error), error, own_frames(error)))
        report = {
            "text": "".join(traceback.format_exception_only(error)).strip(),
            "traceback": text,
            "at": time.monotonic(),
            "lost": all(is_lost(each) for each in chain(error)),
        }
        write(folder / f"error-{rank}.json", json.dumps(report).encode())
        return 1
    close_group(rank)
    flush()
    return 0


def run(job: dict[str, Any]) -> Any:
    """Call the job's function and return its result, or run its script and return None."""
    sys.path[:] = job["sys_path"]
    limit_collectives(job["timeout"])
    where, name, function = job["where"], job["name"], job["function"]
    if where == "file":
        sys.path.insert(0, str(Path(name).parent))
    if function is None:
        sys.argv = [name, *job["arguments"]]
        try:
            if where == "file":
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return None
    found: Any = load(name) if where == "file" else importlib.import_module(name)
    for part in function.split("."):
        found = getattr(found, part)
    # Only now: what the arguments are made of may be defined in that module.
    args, kwargs = pickle.loads(job["arguments"])
    return found(*args, **kwargs)


def load(path: str) -> Any:
    """Import a file by its path."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_collectives(seconds: float) -> None:
    """Let a process group that is made without a timeout wait so long, and not half an hour."""
    from datetime import timedelta

    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    c10d.default_pg_timeout = timedelta(seconds=seconds)
    if c10d.default_pg_nccl_timeout is not None:
        c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)


def close_group(rank: int) -> None:
    """Close a process group that the target has left open.

    While Python ends, its threads would still be there, and now and then abort the process.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        if rank == 0:
            print("The process group was left open. End with cleanup_ddp().", file=sys.stderr)
        dist.destroy_process_group()


def die_with(launcher: int) -> None:
    """End this process when its launcher ends, however that ends: a closed notebook, SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_launcher, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before it was watched
        os._exit(1)


def _watch_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


def own_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and of those that it calls to start a script.

    An error that never left them (no such module) keeps them.
    """
    skipped = (__file__, runpy.__file__, "<frozen runpy>")
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name not in skipped and "importlib" not in name:
            return frame
        frame = frame.tb_next
    return error.__traceback__


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that other ranks are gone or do not come: then the cause is theirs."""
    import torch.distributed as dist

    known: Any = getattr(dist, "DistError", ())
    if isinstance(error, known):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in _LOST)


def write(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all: the launcher reads it meanwhile."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def flush() -> None:
    """Bring out what was printed, before the launcher hears that the process is done."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


if __name__ == "__main__":
    sys.path[0] = ""  # this folder's names are nobody's modules
    _code = main(Path(sys.argv[1]), int(os.environ["RANK"]), int(sys.argv[2]))
    if _code:
        # At once: a process group that lost a rank may hang or abort while Python takes it down.
        os._exit(_code)
