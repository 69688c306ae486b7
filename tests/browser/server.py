"""`make lab`, started for the tests as a student starts it, with a work folder of its own."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from labsupport.paths import cache_dir

# The server picks a free port. The rest of JupyterLab is reached as students reach it; this option
# lets a test ask the page which cells have run, also those that are scrolled out of sight.
OPTIONS = "--no-browser --ServerApp.port=0 --LabApp.expose_app_in_browser=True"
ADDRESS = re.compile(r"http://(?:localhost|127\.0\.0\.1):\d+/lab\S*token=\w+")


@dataclass(frozen=True)
class Server:
    """A running `make lab`: the address that it printed, and the folder that it shows."""

    address: str
    work: Path

    def address_of(self, name: str, workspace: str) -> str:
        """Where one file opens, in a workspace of its own: no tab of another test stands there."""
        return self.address.replace("/lab?", f"/lab/workspaces/{workspace}/tree/{name}?") + "&reset"

    def end_kernels(self) -> None:
        """End all kernels that tests have left behind."""
        for kernel in json.loads(self._ask("api/kernels")):
            self._ask(f"api/kernels/{kernel['id']}", method="DELETE")

    def _ask(self, path: str, method: str = "GET") -> bytes:
        request = urllib.request.Request(self.address.replace("/lab?", f"/{path}?"), method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


class MakeLab:
    """Starts `make lab`, and ends it with all that it has started."""

    def __init__(self, project: Path, folder: Path, *, within: float = 120) -> None:
        """Start it.

        Args:
            project: the folder with the Makefile.
            folder: an empty folder for the student's copies, and for JupyterLab's own files.
            within: seconds until the address must have been printed.

        Raises:
            RuntimeError: no address was printed; the message quotes what was.
        """
        self._log = folder / "make-lab.txt"
        # Neither the user's settings nor last week's tabs take part.
        private = {
            name: str(folder / "jupyter" / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["make", "lab", f"PY={sys.executable}", f"WORK={folder}/work", f"ARGS={OPTIONS}"],
                cwd=project,
                env={**os.environ, **private, "LABSUPPORT_CACHE": str(cache_dir())},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.server = Server(self._address(within), folder / "work")
        except BaseException:
            self.end()
            raise

    def _address(self, within: float) -> str:
        deadline = time.monotonic() + within
        while True:
            said = self._log.read_text()
            if found := ADDRESS.search(said):
                return found[0]
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`make lab` printed no address:\n{said}")
            time.sleep(0.1)

    def end(self) -> None:
        """End the server and the kernels; what does not end by itself is killed."""
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            if "jupyterlab" in _command(process):
                process.terminate()  # JupyterLab: it ends its kernels first
        _, left = psutil.wait_procs(family, timeout=20)
        for process in left:
            process.kill()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
