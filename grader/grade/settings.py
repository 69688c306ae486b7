"""Settings of grading: limits, permissions, and when work was due."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """An instructor's choices.

    Attributes:
        cell_timeout_s: for one cell of the student's, and for one check.
        notebook_timeout_s: for a whole notebook.
        memory_bytes: of all of a submission's processes together.
        network: whether submissions may use the network. They are kept from it where the system
            lets us; where it does not, every result carries a flag that says so.
        jobs: submissions graded at the same time.
        threads: that PyTorch may use, in each.
        due: when the work was due; later files carry a flag. None: no date.
        seed: inputs are drawn anew in each run if None; a number repeats a run.
        notebooks: the folder of the solved notebooks; the lab's own if None.
        only: the beginning of a notebook's name ("01"): others are passed over.
        unconfined: grade even where submissions would run as ourselves and nothing keeps them from
            our files and processes; otherwise we refuse.
    """

    cell_timeout_s: float = 60.0
    notebook_timeout_s: float = 300.0
    memory_bytes: int = 4 * 2**30
    network: bool = False
    jobs: int = max(1, (os.cpu_count() or 1) // 2)
    threads: int = 1
    due: datetime | None = None
    seed: int | None = None
    notebooks: Path | None = None
    only: str | None = None
    unconfined: bool = False
