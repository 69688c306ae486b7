"""The memory of real processes, as the grader sees it."""

import os
import subprocess
import sys

import pytest

from grader.handover.watch import extra_memory

MIB = 2**20
# Stands for the jail, which adopts orphans; below it a student's process, and one that detached
# itself from it and does the work.
SANDBOX = """
import ctypes, mmap, os, sys
size = int(sys.argv[1])
def fresh():
    return mmap.mmap(-1, size)
def fill(space):
    for start in range(0, size, 4096):
        space[start] = 1
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
if os.fork() == 0:
    if os.fork() == 0:
        if os.fork() == 0:
            kept = fresh() if sys.argv[2] == "kept" else None
            if kept:
                fill(kept)
            print("ready", flush=True)
            for line in sys.stdin:
                fill(kept or fresh())
                print("done", flush=True)
        os._exit(0)
    os.wait()
    print(os.getpid(), flush=True)
    os.read(os.open(sys.argv[3], os.O_RDONLY), 1)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(("space", "taken", "touched"), [("fresh", 100, 0), ("kept", 0, 100)])
def test_a_process_that_detached_itself_is_seen(tmp_path, space, taken, touched):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SANDBOX, str(200 * MIB), space, str(pipe)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask():
        process.stdin.write("work\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    first, second = process.stdout.readline(), process.stdout.readline()
    (student,) = {first.strip(), second.strip()} - {"ready"}
    try:
        seen = extra_memory(int(student), ask)
    finally:
        process.stdin.close()
        pipe.write_bytes(b"x")
        process.wait(timeout=60)
        process.stdout.close()

    assert seen[0] >= taken * MIB
    assert seen[1] >= touched * MIB
