"""The wheel of a course: everything that a student needs, nothing that a student must not see."""

import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from grader.release import write_project
from labsupport.paths import notebooks_dir, notebooks_in
from tests.grader.leaks import leaks, secret_lines


def place(name):
    """The path in the project of a file of the wheel."""
    return name.removeprefix("labsupport/project/")


@pytest.mark.slow
def test_the_wheel_holds_the_release_and_no_solution_and_works_in_an_empty_folder(tmp_path):
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
    tops = {Path(place(name)).parts[0] for name in names}
    assert tops == {
        *("labsupport", "notebooks", "theory", "data", "scripts", "capstone", "LICENSE")
    }
    for source in notebooks_in(notebooks_dir()):
        secrets = secret_lines(nbformat.read(source, as_version=4))
        for name in names:
            if name.startswith("labsupport/project/notebooks/"):
                assert leaks(secrets, tmp_path / "site" / name) == []

    program = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path / 'site')!r}]\n"
        f"sys.path += {[path for path in sys.path if path.endswith('-packages')]}\n"
        "from labsupport.cli import app\n"
        "for words in (['start'], ['doctor', '--quick'], ['progress']):\n"
        "    app(words, standalone_mode=False)\n"
    )
    (tmp_path / "empty").mkdir()
    started = [sys.executable, "-P", "-S", "-c", program]
    done = subprocess.run(started, cwd=tmp_path / "empty", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 of " in done.stdout
    work = tmp_path / "empty" / "work"
    assert len(notebooks_in(work)) == len(notebooks_in(course / "notebooks"))
    assert (work / "theory" / "README.md").is_file()
