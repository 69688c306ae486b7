"""Many variants graded in one batch, with witnesses around it that see what an attack did."""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
SURVIVOR, PORT = "86471.2193", "PORT_OF_THE_LISTENER"
LEFT_IN_TMP = ("fill-7Q4-0", "hostile-7Q4", "evil")


@dataclass
class Graded:
    """Results of a batch by student, and reports of the witnesses: what attacks did and left."""

    results: dict[str, list[SubmissionResult]]
    course: Path
    submissions: Path
    out: Path
    changed: list[str] = field(default_factory=list)
    connections: int = 0
    survivors: list[str] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)

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


def settings_for(course: Path, **options: object) -> Settings:
    """Short limits, so that what never ends costs seconds."""
    limits = {
        "cell_timeout_s": 15.0,
        "notebook_timeout_s": 60.0,
        "memory_bytes": 3 * 2**29,
        "jobs": 2,
        "unconfined": True,  # some machines that test can do no better
    }
    return Settings(**{**limits, "notebooks": course, **options})  # type: ignore[arg-type]


def hand_in(
    variants: Iterable[Variant],
    bystanders: Iterable[str],
    submissions: Path,
    course: Path,
    port: int,
) -> None:
    """Write everybody's submission into a folder of their own."""
    submissions.mkdir(parents=True, exist_ok=True)
    for name in bystanders:
        (submissions / name).mkdir()
        (submissions / name / "01-Small.ipynb").write_text(Copy(course).solve().text())
    for variant in variants:
        variant.hand_in(submissions / variant.name, course)
        notebook = submissions / variant.name / "01-Small.ipynb"
        if notebook.is_file() and notebook.stat().st_size < 10**6:
            data = notebook.read_bytes()
            if PORT.encode() in data:
                notebook.write_bytes(data.replace(PORT.encode(), str(port).encode()))


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


def _survivors() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            command = Path("/proc", name, "cmdline").read_bytes() if name.isdigit() else b""
            if SURVIVOR.encode() in command:
                found.append(f"{name}: {command!r}")
    return found


def grade_all(
    variants: Iterable[Variant],
    folder: Path,
    bystanders: Iterable[str] = BYSTANDERS,
    **options: object,
) -> Graded:
    """Hand all in, and grade them in one batch: most of the hostile ones wait for their limits."""
    course, submissions, out = folder / COURSE, folder / "submissions", folder / OUT
    home, canary = folder / "home-7Q4", folder / "canary"
    write_course(course)
    home.mkdir()
    (home / "thesis.txt").write_text("the only copy")
    with _listening() as (port, heard), pytest.MonkeyPatch.context() as patch:
        hand_in(variants, bystanders, submissions, course, port)
        patch.setenv("LABSUPPORT_TEST_CANARY", str(canary))
        before = _state(course, submissions, home)
        patch.setenv("HOME", str(home))
        found = find_submissions(submissions, notebooks=course)
        results = run_batch(found, out, settings_for(course, **options))
        after = _state(course, submissions, home)
        connections = len(heard)
    by_student: dict[str, list[SubmissionResult]] = {}
    for result in results:
        by_student.setdefault(result.student, []).append(result)
    changed = [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
    # What the grader itself, or PyTorch within it, caches in a home directory is its own business.
    changed = [p for p in changed if not p.startswith(f"{home}/.")]
    litter = [str(Path("/tmp", name)) for name in LEFT_IN_TMP if Path("/tmp", name).exists()]
    if canary.exists():
        litter.append(str(canary))
    return Graded(by_student, course, submissions, out, changed, connections, _survivors(), litter)
