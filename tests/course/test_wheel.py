"""The wheel of a course: everything that a student needs, nothing that a student must not see."""

import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from grader.release import write_project
from labsupport import __version__
from labsupport.paths import notebooks_dir, notebooks_in
from tests.course.leaks import leaks, secret_lines


def place(name):
    """The path in the project of a file of the wheel."""
    return name.removeprefix("labsupport/project/")


@pytest.mark.slow
def test_the_wheel_holds_the_release_and_no_solution_and_opens_every_notebook_elsewhere(tmp_path):
    course = write_project(tmp_path / "course")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, course]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 20_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        archive.extractall(tmp_path / "site")
    # The tests of the release hold for the wheel, as it adds nothing.
    for name in names:
        assert (tmp_path / "site" / name).read_bytes() == (course / place(name)).read_bytes()
    assert "labsupport/py.typed" in names
    tops = {Path(place(name)).parts[0] for name in names}
    assert tops == {
        *("labsupport", "notebooks", "theory", "data", "scripts", "capstone", "LICENSE")
    }
    for source in notebooks_in(notebooks_dir()):
        secrets = secret_lines(nbformat.read(source, as_version=4))
        for name in names:
            if name.startswith("labsupport/project/notebooks/"):
                assert leaks(secrets, tmp_path / "site" / name) == []

    environment = installed(wheel, tmp_path / "environment")
    (tmp_path / "empty").mkdir()

    def run(*command):
        words = [environment / "bin" / command[0], *command[1:]]
        done = subprocess.run(words, cwd=tmp_path / "empty", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("labsupport", "--version") == f"labsupport {__version__}\n"
    run("labsupport", "start")
    run("labsupport", "doctor")
    assert "0 of " in run("labsupport", "progress")
    work = tmp_path / "empty" / "work"
    assert (work / "theory" / "README.md").is_file()
    copies = sorted(path.relative_to(work) for path in notebooks_in(work))
    assert copies == sorted(p.relative_to(notebooks_dir()) for p in notebooks_in(notebooks_dir()))
    assert run("python", "-c", FIRST_CELLS, *(work / copy for copy in copies)).count(
        "opened: "
    ) == len(copies)


FIRST_CELLS = """
import sys, nbformat, labsupport
from IPython.core.interactiveshell import InteractiveShell
assert labsupport.__file__.startswith(sys.prefix), labsupport.__file__
shell = InteractiveShell.instance()
for path in sys.argv[1:]:
    cells = nbformat.read(path, as_version=4).cells
    first = next(cell.source for cell in cells if cell.cell_type == "code")
    shell.run_cell(first).raise_error()
    print("opened:", path)
"""


def installed(wheel, folder):
    """A new environment with this wheel, and what it needs from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*install, wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    (site / "needed.pth").write_text("\n".join(here), encoding="utf-8")
    return folder
