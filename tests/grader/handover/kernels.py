"""A student's process for tests: a plain Python that runs solution cells and serves."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jupytext

from grader.handover.remote import Session
from labsupport.course.editions import student_edition
from labsupport.paths import notebooks_dir

# One file after the other, in one process: to start one takes longer than most checks. A cell
# stands in a file, because Triton and inspect read a function's source.
PROGRAM = """
import runpy, sys
from grader.handover.worker import serve
for cell in sys.argv[2:]:
    serve(runpy.run_path(cell), sys.argv[1])
"""
IMPORTS = """
import math
import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl
from labsupport.attention import attention, flash_attention
from labsupport.precision import FlashAttentionConfig
"""


@contextlib.contextmanager
def students(*sources: str, timeout_s: float = 120.0) -> Iterator[Iterator[Session]]:
    """Sessions, one for each source, with a process that runs them one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "s"))
        files = [Path(folder, f"cell{i}.py") for i in range(len(sources))]
        for file, source in zip(files, sources, strict=True):
            file.write_text(source)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(300)
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, path, *map(str, files)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                cwd=folder,
            )

            def sessions() -> Iterator[Session]:
                for _ in sources:
                    session = Session(listener.accept()[0], timeout_s)
                    try:
                        yield session
                    finally:
                        session.close()

            try:
                yield sessions()
            finally:
                process.kill()
                process.wait()


@cache
def cells(notebook: str, *, stubs: bool = False) -> dict[str, tuple[str, bool]]:
    """grade_id -> (source, whether it is a check) of the instructor's notebook, or a student's."""
    (path,) = notebooks_dir().glob(f"{notebook}*.ipynb")
    notebook_read = jupytext.read(path)
    if stubs:
        notebook_read = student_edition(notebook_read)
    found = {}
    for cell in notebook_read.cells:
        data = cell.metadata.get("nbgrader")
        if data and cell.cell_type == "code":
            found[data["grade_id"]] = cell.source, data["grade"]
    return found


def all_stubs(notebook: str) -> str:
    """All solution cells of a notebook as they are handed out, as one program."""
    found = cells(notebook, stubs=True).values()
    return IMPORTS + "\n\n".join(source for source, check in found if not check)
