"""A course of nbgrader on the lab's first notebook, and the solutions that the notebook holds."""

import os
import re
import subprocess
import sys

from labsupport import paths

NAME = "01-Setup_and_Comparison"


def solutions_of(solved):
    """The contents of the solution cells, by grade_id, without their markers."""
    return {
        cell.metadata.nbgrader.grade_id: re.sub(r"(?m)^\s*### (BEGIN|END) .*\n?", "", cell.source)
        for cell in solved.cells
        if cell.metadata.get("nbgrader", {}).get("solution")
    }


class Course:
    """A course of nbgrader with the configuration that GRADING.md gives."""

    def __init__(self, folder, solved):
        """Set it up with one assignment; `solved` is the text of the instructor's notebook."""
        self.folder = folder
        guide = (paths.project_root() / "GRADING.md").read_text(encoding="utf-8")
        configuration = guide.split("<<'CONFIG'\n")[1].split("CONFIG\n")[0]
        (folder / "source" / "lab").mkdir(parents=True)
        (folder / "nbgrader_config.py").write_text(configuration, encoding="utf-8")
        (folder / "source" / "lab" / f"{NAME}.ipynb").write_text(solved, encoding="utf-8")
        self.run("generate_assignment", "lab")

    def run(self, *command):
        """Run an nbgrader command, with nothing of the user's own configuration."""
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "JUPYTER_PATH": f"{sys.prefix}/share/jupyter",
            "IPYTHONDIR": str(self.folder / "ipython"),
            "PYTHONPATH": str(paths.project_root()),
            "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        call = [sys.executable, "-m", "nbgrader", *command]
        done = subprocess.run(
            call, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert not done.returncode, f"nbgrader {command[0]} failed: {done.stderr[-2000:]}"

    def hand_in(self, student, text):
        """Write a student's notebook where nbgrader expects it."""
        path = self.folder / "submitted" / student / "lab" / f"{NAME}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        return path
