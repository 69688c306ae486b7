"""A class, whose grading is killed twice on the way and resumed: nothing lost, nothing twice.

The test takes eight students and one notebook. For 200 students with all four notebooks, of whom a
tenth is hostile (47 minutes on two cores):

    python -m tests.grader.test_class_of_200 200 FOLDER
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from grader.grade.results import read_results
from labsupport.paths import notebooks_dir, notebooks_in

# What a student's last exercise holds, on which no other depends; "solved" and "untouched" ones
# are so as a whole.
WORK = ("solved", "hostile", "untouched", "solved", "", "solved", "def f(:", *["solved"] * 3)
HOSTILE = (
    "import os\nos._exit(0)",
    "kept = []\nwhile True:\n    kept.append(b'x' * 2**26)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "while True:\n    pass",
)


def hand_in(folder, students, notebooks):
    """Write a class; return the points that each student should get in each notebook."""
    deserved = {}
    for number in range(students):
        work, student = WORK[number % len(WORK)], f"student-{number:03}"
        (folder / student).mkdir(parents=True)
        if work == "hostile":
            work = HOSTILE[number // len(WORK) % len(HOSTILE)]
        for path in notebooks:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            roles = [cell["metadata"].get("nbgrader", {}) for cell in notebook["cells"]]
            last = [role["grade_id"] for role in roles if role.get("solution")][-1]
            lost = "" if work == "untouched" else last
            points = 0
            for cell, role in zip(notebook["cells"], roles, strict=True):
                if role.get("solution") and work == "untouched":
                    cell["source"] = ""
                elif role.get("grade_id") == last and work != "solved":
                    cell["source"] = work
                if role.get("grade") and (
                    work == "solved" or not role["grade_id"].startswith(lost)
                ):
                    points += role["points"]
            (folder / student / path.name).write_text(json.dumps(notebook), encoding="utf-8")
            deserved[student, path.stem] = points
    return deserved


def grading(submissions, out, *options):
    """The `labsupport grade` program, in a session of its own."""
    command = [sys.executable, "-m", "labsupport.cli", "grade", str(submissions), "--out", str(out)]
    command += ["--jobs", "2", "--unconfined", *options]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def kill_when(process, path, lines, timeout_s):
    """Kill the program, and nothing else, as soon as the file has so many lines."""
    end = time.monotonic() + timeout_s
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, f"it ended with status {process.returncode}"
        assert time.monotonic() < end, f"fewer than {lines} results in {timeout_s} s"
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, f"left behind by the killed program: {alive}"


def check_class(folder, students, notebooks):
    submissions, out = folder / "submissions", folder / "out"
    deserved = hand_in(submissions, students, notebooks)
    results, states, longest = out / "results.jsonl", [], 60 + 60 * len(deserved)
    for number, fraction in enumerate((0.2, 0.7)):
        process = grading(submissions, out, *(["--resume"] if number else []))
        kill_when(process, results, int(fraction * len(deserved)), longest)
        states.append(results.read_bytes())
    assert grading(submissions, out, "--resume").wait(timeout=longest) == 0
    graded = read_results(out)
    assert Counter((r.student, r.notebook) for r in graded) == dict.fromkeys(deserved, 1)
    earned = {(r.student, r.notebook): r.earned for r in graded}
    assert {key: (earned[key], n) for key, n in deserved.items() if earned[key] != n} == {}
    # Each whole line that was there at the moment of a kill is there now.
    final = results.read_bytes().splitlines()
    for state in states:
        kept = [line for line in state.splitlines(keepends=True) if line.endswith(b"\n")]
        assert [line.rstrip(b"\n") for line in kept] == final[: len(kept)]
    return graded


@pytest.mark.slow
def test_a_class_killed_twice_and_resumed_is_graded_once(tmp_path):
    check_class(tmp_path, 8, [next(notebooks_dir().glob("04-*.ipynb"))])


if __name__ == "__main__":
    begin = time.monotonic()
    found = check_class(Path(sys.argv[2]), int(sys.argv[1]), notebooks_in(notebooks_dir()))
    seconds = (time.monotonic() - begin) / len(found)
    print(f"{len(found)} graded once, points right; {seconds:.1f} s each")
