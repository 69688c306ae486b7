"""Many variants graded in one batch, with witnesses around it that see what an attack did."""

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from grader.grade.batch import run_batch
from grader.grade.results import Settings, SubmissionResult
from grader.grade.submissions import find_submissions
from tests.grader.variants.course import EXERCISES, Copy, Variant, write_course

# Perfect work, graded before, among and after the others: nothing may be taken from it.
BYSTANDERS = ("a-bystander", "bystander-a", "m-bystander", "z-bystander")
NAMES = {identifier: exercise for exercise, identifier in EXERCISES.items()}
COURSE, OUT = "instructors-7Q4", "results-7Q4"
# What hostile submissions leave, where they can. The port is put in when they are handed in.
SURVIVOR, CALLER, PORT = "86471.2193", "calls-out", "PORT_OF_THE_LISTENER"
LEFT_IN_TMP = ("fill-7Q4-0", "hostile-7Q4", "evil")


@dataclass
class Graded:
    """Results of a batch by student, and reports of the witnesses: what attacks did and left."""

    results: dict[str, list[SubmissionResult]]
    out: Path
    changed: list[str]
    connections: int
    survivors: list[str]
    litter: list[str]

    def points(self, student: str) -> dict[str, float]:
        """The student's points by exercise; exercises without a result are left out."""
        found: dict[str, float] = {}
        for result in self.results.get(student, []):
            for check in result.checks:
                exercise = NAMES[check.exercise]
                found[exercise] = found.get(exercise, 0) + check.earned
        return found

    def story(self, student: str) -> str:
        """Everything that was said of the student, for a failing test."""
        lines = [f"{student}: {len(self.results.get(student, []))} results"]
        for result in self.results.get(student, []):
            lines.append(f"{result.path!r} {result.status} {result.reason} {result.seconds:.1f} s")
            lines += [f"  {c.grade_id}: {c.status} {c.message[:900]}" for c in result.checks]
            lines += [f"  flag {f.kind} {f.grade_id}: {f.text[:200]}" for f in result.flags]
        return "\n".join(lines)


def _state(*folders: Path) -> dict[str, str]:
    """A digest of every file, links and special files by their kind."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            with contextlib.suppress(PermissionError):
                mode, seen = path.lstat().st_mode, ""
                if path.is_file() and not path.is_symlink():
                    seen = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = f"{mode:o} {seen}"
    return found


@contextlib.contextmanager
def _listening() -> Iterator[tuple[int, list[object]]]:
    """A server on this machine, and whom it heard of."""
    heard: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, address = server.accept()
                    heard.append(address)
                    connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], heard
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def grade_all(
    variants: Iterable[Variant], folder: Path, bystanders: Iterable[str] = BYSTANDERS, jobs: int = 2
) -> Graded:
    """Hand all in, each in a folder of its own, and grade them in one batch."""
    course, submissions, out = folder / COURSE, folder / "submissions", folder / OUT
    home, canary = folder / "home-7Q4", folder / "canary"
    write_course(course)
    for place in (submissions, home):
        place.mkdir()
    (home / "thesis.txt").write_text("the only copy")
    # Short limits, so that what never ends costs seconds. Some machines can do no better than
    # `unconfined`.
    settings = Settings(15.0, 60.0, 3 * 2**29, jobs, course, unconfined=True)
    with _listening() as (port, heard), pytest.MonkeyPatch.context() as patch:
        for name in bystanders:
            (submissions / name).mkdir()
            (submissions / name / "01-Small.ipynb").write_text(Copy(course).solve().text())
        for variant in variants:
            variant.hand_in(submissions / variant.name, course)
        caller = submissions / CALLER / "01-Small.ipynb"
        if caller.exists():
            caller.write_text(caller.read_text().replace(PORT, str(port)))
        patch.setenv("LABSUPPORT_TEST_CANARY", str(canary))
        before = _state(course, submissions, home)
        patch.setenv("HOME", str(home))
        results = run_batch(find_submissions(submissions, notebooks=course), out, settings)
        after = _state(course, submissions, home)
        connections = len(heard)
    by_student: dict[str, list[SubmissionResult]] = {}
    for result in results:
        by_student.setdefault(result.student, []).append(result)
    changed = [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
    # What the grader itself, or PyTorch within it, caches in a home directory is its own business.
    changed = [p for p in changed if not p.startswith(f"{home}/.")]
    left = [canary, *(Path("/tmp", name) for name in LEFT_IN_TMP)]
    litter = [str(path) for path in left if path.exists()]
    running = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    survivors = [command for command in running if SURVIVOR in command]
    return Graded(by_student, out, changed, connections, survivors, litter)
