"""Programs in the sandbox: a few cells of Python stand for a submission."""

import dataclasses
import platform
import sys
import time
from pathlib import Path

import pytest

from grader.grade.plan import Step
from grader.grade.sandbox import Sandbox, wall_missing

if sys.platform != "linux":
    pytest.skip("grading needs Linux", allow_module_level=True)

walled = pytest.mark.skipif(bool(wall_missing()), reason="there is no bubblewrap here")
# Each call says what it gave, or the name of the exception that it raised.
TRIED = """
import ctypes, os, socket, subprocess, threading

def attempt(do):
    try:
        return do()
    except Exception as error:
        return type(error).__name__

def write(path, size):
    with open(path, "wb") as file:
        file.write(bytes(size))

def start_a_thread():
    thread = threading.Thread(target=int)
    thread.start()

def f():
    return {name: attempt(do) for name, do in {
        "home": lambda: os.path.exists(HOME),
        "notebooks": lambda: os.path.exists(NOTEBOOKS),
        "accounts": lambda: open("/etc/passwd").read(),
        "control groups": lambda: os.path.exists("/sys/fs"),
        "networks": lambda: [name for _, name in socket.if_nameindex()],
        "processes": lambda: len([n for n in os.listdir("/proc") if n.isdigit()]) <= 3,
        "the environment": lambda: "secret" in os.environ.values(),
        "fork": os.fork,
        "a program": lambda: subprocess.run(["true"]),
        "a thread": start_a_thread,
        "memory as a file": lambda: os.memfd_create("x"),
        "hidden memory": lambda: write("/proc/self/clear_refs", 1),
        "keys": lambda: ctypes.CDLL(None).syscall(KEYS, 0, -3, 0),
        "the packages": lambda: write("/usr/new", 1),
        "the root": lambda: write("/new", 1),
        "devices": lambda: write("/dev/shm/new", 1),
        "a file": lambda: write("new", 2**20),
        "a large file": lambda: write("large", 2**26),
        "cells": lambda: (x, made),
    }.items()}
"""


@walled
def test_a_submission_reaches_nothing_but_python_and_a_small_folder(settings, project, monkeypatch):
    monkeypatch.setenv("COURSE_TOKEN", "secret")
    keys = 250 if platform.machine() == "x86_64" else 219
    paths = f"HOME, NOTEBOOKS = {str(Path.home() / '.ssh')!r}, {str(project / 'notebooks')!r}"
    paths += f"; KEYS = {keys}"
    steps = [
        Step("while True:\n    pass"),
        Step("!touch made\n%time x = 3\nimport os\nmade = os.path.exists('made')"),
        Step(f"{paths}\n{TRIED}"),
    ]
    with Sandbox(dataclasses.replace(settings, cell_timeout_s=2)) as box:
        start = time.monotonic()
        gave = box.run(steps, 60).compute("call", "f", (), {})
        assert time.monotonic() - start < 60
        assert box.first_error.startswith("CellTimeout")
    assert gave == {
        "home": False,
        "notebooks": False,
        "accounts": "FileNotFoundError",
        "control groups": False,
        "networks": ["lo"],
        "processes": True,
        "the environment": False,
        "fork": "PermissionError",
        "a program": "PermissionError",
        "a thread": None,
        "memory as a file": "PermissionError",
        "hidden memory": "OSError",
        "keys": -1,
        "the packages": "OSError",
        "the root": "OSError",
        "devices": "OSError",
        "a file": None,
        "a large file": "OSError",
        "cells": (3, False),
    }
