"""Results on disk as they come: one line each, complete or not there at all."""

import os
from pathlib import Path

from grader.grade.results import SubmissionResult

NAME = "results.jsonl"


def read_results(out: Path) -> list[SubmissionResult]:
    """All results in OUT/results.jsonl, in the order in which they came.

    A line that an interruption cut off is passed over: its submission is graded again.

    Raises:
        OSError: the file cannot be read.
    """
    path = out / NAME
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(SubmissionResult.from_json(line.decode("ascii")))
        except ValueError:
            continue
    return found


class Journal:
    """The file, open for one more result at a time."""

    def __init__(self, out: Path) -> None:
        path = out / NAME
        self._file = path.open("ab")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            # What was cut off stays a line of its own, and harms none.
            self._file.write(b"\n")

    def add(self, result: SubmissionResult) -> None:
        """Write a result; when this returns it is on the disk."""
        self._file.write(result.to_json().encode("ascii") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
