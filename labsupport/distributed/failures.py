"""What is said of a rank that failed: a line where its error explains itself, else the traceback.

Without PyTorch, since the program `labsupport` imports it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labsupport.distributed.launch import LaunchError

# By their exact names: a RuntimeError that is none of these is a bug, and wants its traceback.
SELF_EXPLAINING = frozenset(
    {
        *("ValueError", "AttentionInputError", "ResumeError"),
        *("BackendUnavailableError", "AttentionRefusedError", "RanksDidNotMeetError"),
        *("TrainingDivergedError", "CheckpointError", "OutOfMemoryError"),
        *("DownloadError", "RecallWeightsError", "ProjectNotFoundError"),
        *("OSError", "FileNotFoundError", "FileExistsError", "PermissionError"),
        *("NotADirectoryError", "IsADirectoryError"),
    }
)


def explains_itself(error: BaseException) -> bool:
    """Whether an error says all that there is to say."""
    return type(error).__name__ in SELF_EXPLAINING


def short(error: LaunchError) -> str:
    """A launch's error, without the traceback if the rank's own explains itself."""
    text = str(error)
    first = text.split("\n\nTraceback", maxsplit=1)[0]
    kind = re.match(r"rank \d+ of \d+ failed: ([\w.]+)(:|$)", first)
    explained = kind is not None and kind[1].rsplit(".", 1)[-1] in SELF_EXPLAINING
    return f"labsupport: {first if explained else text}"
