"""Errors of ranks: causes, and mere consequences of another rank's error; the end of a rank.

Imports no PyTorch, since the program `labsupport` imports it.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

# By their exact names: a RuntimeError that is none of these is a bug, and needs its traceback.
SELF_EXPLAINING = {
    *("ValueError", "AttentionInputError", "AttentionRefusedError", "BackendUnavailableError"),
    *("TrainingDivergedError", "ResumeError", "CheckpointError", "OutOfMemoryError"),
    *("DownloadError", "ProjectNotFoundError", "RendezvousError", "OSError"),
    *("FileNotFoundError", "FileExistsError", "PermissionError", "NotADirectoryError"),
    "IsADirectoryError",
}
# What PyTorch's errors say when another rank is gone, or does not come.
_LOST = ("gloo", "nccl", "processgroup", "tcpstore", "connection closed", "connection reset")


def explains_itself(error: BaseException | str) -> bool:
    """True if an error, or one of this class name, needs no traceback."""
    name = error if isinstance(error, str) else type(error).__name__
    return name.rsplit(".", 1)[-1] in SELF_EXPLAINING


def is_lost(error: BaseException) -> bool:
    """True if an error says that other ranks are gone or late: then the cause is theirs."""
    import torch.distributed as dist

    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and not is_lost(cause):
        return False
    text = str(error).lower()
    return isinstance(error, getattr(dist, "DistError", ())) or (
        isinstance(error, RuntimeError | OSError) and any(word in text for word in _LOST)
    )


def short(error: Exception) -> str:
    """Return a `LaunchError`'s text, without the traceback if the rank's own error needs none."""
    text = str(error)
    first = text.split("\n\nTraceback", maxsplit=1)[0]
    kind = first.partition(" failed: ")[2].partition(":")[0].partition("\n")[0]
    return f"labsupport: {first if explains_itself(kind) else text}"


def end_process(status: int) -> NoReturn:
    """End this rank immediately, all that it has printed shown; for a process of its own.

    Not every process group ends with `destroy_process_group`: FSDP's stays in caches of DTensor
    that have no public way to be cleared, and gloo's threads with it (PyTorch 2.13). While Python
    takes the process down, these sometimes abort it; and of a group that lost a rank, they may wait
    for that rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
