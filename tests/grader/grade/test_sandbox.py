"""What a program can do in its place; a shell or a short Python stands for a submission."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grader.grade import processes
from grader.grade.confinement import (
    JAIL,
    Confinement,
    confinement_here,
    prepare_folder,
    remove_folder,
    write_plan,
)


@pytest.fixture(params=["as well as can be", "without namespaces"])
def confinement(request, settings):
    best = confinement_here(settings)
    return best if request.param == "as well as can be" else Confinement(False, None)


@pytest.fixture
def run(settings, confinement):
    """Run Python text confined; returns the finished process."""
    folder = prepare_folder()
    notebook = folder / "given" / "work.ipynb"
    notebook.write_text("{}")

    def started(code, **options):
        chosen = dataclasses.replace(settings, **options)
        command = [sys.executable, "-c", code]
        plan = write_plan(folder, command, notebook, folder / "given", chosen, confinement)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), str(plan)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finished(code, **options):
        process = started(code, **options)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    finished.start = started
    yield finished
    remove_folder(folder)


def test_it_starts_in_a_clean_folder_that_holds_the_notebook(run):
    code, said = run("import os; print(sorted(os.listdir()), open('work.ipynb').read())")

    assert (code, said.strip()) == (0, "['home', 'work.ipynb'] {}")


def test_the_environment_holds_nothing_of_the_instructors(run, monkeypatch):
    monkeypatch.setenv("COURSE_TOKEN", "secret")

    _, said = run("import os, json; print(json.dumps(dict(os.environ)))")

    assert "secret" not in said
    assert json.loads(said)["HOME"].endswith("/run/home")


def test_the_exit_status_is_the_programs(run):
    assert run("import sys; sys.exit(7)")[0] == 7


def test_nothing_is_left_running_also_not_what_detached_itself(run, tmp_path):
    mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        "import os, sys, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            sleep = 'import time; time.sleep(600)'\n"
        f"            os.execv(sys.executable, [sys.executable, '-c', sleep, '{mark}'])\n"
        "        os._exit(0)\n"
        "time.sleep(0.5)\n"
    )

    assert run(code)[0] == 0
    assert not _running(mark)


def test_when_its_starter_is_told_to_end_everything_ends(run):
    mark = f"told-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        "import subprocess, sys\n"
        "sleep = 'import time; print(1, flush=True); time.sleep(600)'\n"
        f"subprocess.run([sys.executable, '-c', sleep, '{mark}'])"
    )
    process = run.start(code)
    assert process.stdout.readline().strip() == "1"
    assert _running(mark)

    process.terminate()
    process.wait(timeout=30)
    process.stdout.close()

    assert not _running(mark)


def test_files_grow_to_the_limit_and_no_further(run):
    code = "open('big', 'wb').write(bytes(30 * 2**20))"

    assert run(code, folder_bytes=20 * 2**20)[0] != 0


def test_with_namespaces_there_is_no_network_and_nobody_elses_file(run, confinement, project):
    if not confinement.namespaces:
        pytest.skip("this system lets us make no namespaces, or this is the case without")
    hidden = [str(project / "notebooks"), str(Path.home() / ".ssh")]
    code = (
        "import os, socket\n"
        f"print([os.path.exists(path) for path in {hidden!r}])\n"
        "print([name for _, name in socket.if_nameindex()])\n"
        "print(len([n for n in os.listdir('/proc') if n.isdigit()]))\n"
        "try:\n"
        "    open('/usr/new', 'w')\n"
        "except OSError:\n"
        "    print('read-only')\n"
    )

    said = run(code)[1].split("\n")

    assert said[0] == "[False, False]"
    assert said[1] == "['lo']"
    assert int(said[2]) <= 3
    assert said[3] == "read-only"


def test_a_root_user_does_not_lend_its_rights(run, confinement):
    if confinement.uid is None:
        pytest.skip("we are not root, or run it as ourselves")

    assert run("import os; print(os.getuid() != 0, os.getgroups())")[1].strip() == "True []"


def test_memory_of_all_descendants_is_seen(run):
    process = run.start(
        "import os, time; block = bytearray(2**27); block[::4096] = bytes([1]) * 2**15\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    assert process.stdout.readline().strip() == "ready"

    assert sum(processes.descendants(process.pid).values()) > 2**27

    process.terminate()
    process.wait(timeout=30)
    process.stdout.close()


def _running(mark):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False
