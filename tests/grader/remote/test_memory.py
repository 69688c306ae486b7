"""The memory of a real process, as the grader sees it."""

import subprocess
import sys

import pytest

from grader.remote.evaluate import extra_memory

MIB = 2**20
PROGRAM = """
import mmap, sys
size = int(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    space = mmap.mmap(-1, size)
    for start in range(0, size, 4096):
        space[start] = 1
    print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_that_is_taken_is_seen():
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(200 * MIB)]
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
    assert seen >= 190 * MIB
