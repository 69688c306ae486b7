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

from grader.remote.session import Session
from labsupport.course.editions import student_edition
from labsupport.paths import notebooks_dir, notebooks_in

# One file after the other, in one process: to start one takes longer than most checks. A cell
# stands in a file, because Triton and inspect read a function's source.
PROGRAM = """
import runpy, socket, sys
from grader.remote.watch import Watch
from grader.remote.worker import serve
for descriptor, cell in zip(sys.argv[1::2], sys.argv[2::2]):
    serve(runpy.run_path(cell), socket.socket(fileno=int(descriptor)), Watch())
"""
IMPORTS = """
import math
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from labsupport.attention import attention, flash_attention
from labsupport.checks.guard import check_guard, guarded_zeros
from labsupport.distributed.by_hand import gradients_on_rank, layer_on_rank, rehearse
from labsupport.precision import FlashAttentionConfig
"""


@contextlib.contextmanager
def students(*sources: str, timeout_s: float = 120.0) -> Iterator[Iterator[Session]]:
    """Sessions, one for each source, with a process that runs them one after the other."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        arguments, ours, theirs = [], [], []
        for i, source in enumerate(sources):
            Path(folder, f"cell{i}.py").write_text(source)
            mine, its = map(stack.enter_context, socket.socketpair())
            ours.append(mine)
            theirs.append(its)
            arguments += [str(its.fileno()), f"cell{i}.py"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            pass_fds=[one.fileno() for one in theirs],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=folder,
        )

        def sessions() -> Iterator[Session]:
            for connection in ours:
                with contextlib.closing(Session(connection, process.pid, timeout_s)) as session:
                    yield session

        for one in theirs:
            one.close()
        try:
            yield sessions()
        finally:
            process.kill()
            process.wait()


@cache
def cells(exercises: str, *, stubs: bool = False) -> dict[str, tuple[str, bool]]:
    """grade_id -> (source, whether it is a check) of exercises, solved or as students get them.

    `exercises` is how their grade_ids begin, such as "ex-2".
    """
    found = {}
    for path in notebooks_in(notebooks_dir()):
        solved = jupytext.read(path)
        for cell in (student_edition(solved) if stubs else solved).cells:
            data = cell.metadata.get("nbgrader")
            if data and cell.cell_type == "code" and data["grade_id"].startswith(exercises):
                found[data["grade_id"]] = cell.source, data["grade"]
    return found
