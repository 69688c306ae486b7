"""Settings of grading."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """An instructor's choices.

    Attributes:
        cell_timeout_s: for one cell of the student's, and for one check.
        jobs: submissions graded at the same time, each on one core.
        notebooks: the folder of the solved notebooks; the lab's own if None.
        unconfined: grade even where nothing keeps submissions from our files and processes.
    """

    cell_timeout_s: float = 60.0
    notebook_timeout_s: float = 300.0
    memory_bytes: int = 4 * 2**30
    jobs: int = max(1, (os.cpu_count() or 1) // 2)
    notebooks: Path | None = None
    unconfined: bool = False
