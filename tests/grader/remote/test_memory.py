"""The memory of a real process, as the grader sees it."""

import subprocess
import sys

import pytest

from grader.remote.evaluate import extra_memory

MIB = 2**20
PROGRAM = """
import mmap, sys
size = int(sys.argv[1])
def fill(space):
    for start in range(0, size, 4096):
        space[start] = 1
    return space
kept = fill(mmap.mmap(-1, size)) if sys.argv[2] == "kept" else None
print("ready", flush=True)
for line in sys.stdin:
    fill(kept or mmap.mmap(-1, size))
    print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(("space", "taken", "touched"), [("fresh", 190, 0), ("kept", 0, 130)])
def test_memory_that_is_taken_or_only_touched_is_seen(space, taken, touched):
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(200 * MIB), space]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask():
            process.stdin.write("work\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        process.stdout.readline()
        seen = extra_memory(process.pid, ask)
        process.stdin.close()
    assert seen[0] >= taken * MIB
    assert seen[1] >= touched * MIB
