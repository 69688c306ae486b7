"""A class, whose grading is killed twice on the way and resumed: nothing lost, nothing twice.

The whole class of 200 is a slow test. A small class goes through the same in every run.
"""

import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from grader.grade.batch import read_results
from tests.grader.variants.course import EXERCISES, Copy, solution, write_course

STUB = "raise NotImplementedError"
# What the n-th student handed in, and the points for it.
WORK = {
    "perfect": (3, ()),
    "one matrix": (1, (("return 2 * batch", "return batch"),)),
    "one too long": (2, (("return math.isqrt(", "return 1 + math.isqrt("),)),
    "untouched": (0, None),
}


def hand_in(folder, course, size):
    """Returns the points that each student should get."""
    deserved = {}
    for number in range(size):
        points, changes = WORK[list(WORK)[number % len(WORK)]]
        copy = Copy(course, "01-Tiny")
        if changes is not None:
            copy.solve("memory").change("memory", *changes)
        student = f"student-{number:03}"
        (folder / student).mkdir(parents=True)
        (folder / student / "01-Tiny.ipynb").write_text(copy.text())
        deserved[student] = points
    return deserved


def grading(submissions, out, course, *options):
    """The `labsupport grade` program, in a session of its own."""
    command = [sys.executable, "-m", "labsupport.cli", "grade", str(submissions), "--out", str(out)]
    command += ["--notebooks", str(course), "--jobs", "2", "--unconfined", *options]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(process, path, lines, timeout_s):
    """Kill the program, and nothing else, as soon as the file has so many lines."""
    end = time.monotonic() + timeout_s
    while lines_in(path) < lines:
        assert process.poll() is None, f"it ended by itself with status {process.returncode}"
        assert time.monotonic() < end, f"only {lines_in(path)} results in {timeout_s} s"
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return below


def grade_and_kill_twice(folder, size):
    course, submissions, out = folder / "course", folder / "submissions", folder / "out"
    write_course(course, ("01-Tiny",))
    deserved = hand_in(submissions, course, size)
    results, states = out / "results.jsonl", []
    for number, fraction in enumerate((0.2, 0.7)):
        process = grading(submissions, out, course, *(["--resume"] if number else []))
        below = kill_when(process, results, int(fraction * size), 60 + 20 * size)
        _, alive = psutil.wait_procs(below, timeout=30)
        assert not alive, f"left behind by the killed program: {alive}"
        states.append(results.read_bytes())
    process = grading(submissions, out, course, "--resume")
    assert process.wait(timeout=60 + 20 * size) == 0
    return deserved, states, results, read_results(out)


def check_class(folder, size):
    deserved, states, results, graded = grade_and_kill_twice(folder, size)
    assert Counter(result.student for result in graded) == dict.fromkeys(deserved, 1)
    assert {result.student: result.earned for result in graded} == deserved
    assert all({c.exercise for c in r.checks} == {EXERCISES["memory"]} for r in graded)
    # Every whole line that was there at the moment of a kill is there now, and none came twice.
    final = results.read_bytes().splitlines()
    for state in states:
        kept = [line for line in state.splitlines(keepends=True) if line.endswith(b"\n")]
        assert [line.rstrip(b"\n") for line in kept] == final[: len(kept)]
    whole = [line for line in final if line.startswith(b"{") and line.endswith(b"}")]
    assert len(whole) == size


def test_a_small_class_killed_twice_and_resumed_is_graded_once(tmp_path):
    check_class(tmp_path, 12)


@pytest.mark.slow
def test_a_class_of_200_killed_twice_and_resumed_is_graded_once(tmp_path):
    check_class(tmp_path, 200)


def test_the_class_handed_in_what_it_should(tmp_path):
    course = write_course(tmp_path / "course", ("01-Tiny",))
    deserved = hand_in(tmp_path / "submissions", course, 4)
    assert list(deserved.values()) == [3, 1, 2, 0]
    texts = [path.read_text() for path in sorted((tmp_path / "submissions").rglob("*.ipynb"))]
    assert [STUB in text for text in texts] == [False, False, False, True]
    assert "return 2 * batch" in solution("memory")
