"""`make lab`, started for the tests as a student starts it, with a work folder of its own."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import psutil

from labsupport.paths import cache_dir

# The server picks a free port. The rest of JupyterLab is reached as students reach it; this option
# lets a test ask the page which cells have run, also those that are scrolled out of sight.
OPTIONS = "--no-browser --ServerApp.port=0 --LabApp.expose_app_in_browser=True"
ADDRESS = re.compile(r"http://(?:localhost|127\.0\.0\.1):\d+/lab\S*token=\w+")


class MakeLab:
    """A running `make lab`: the `address` that it printed, and the folder `work` that it shows."""

    def __init__(self, project, folder, *, within=120.0):
        """Start it, with the student's copies and JupyterLab's own files in an empty folder."""
        log, self.work = folder / "make-lab.txt", folder / "work"
        # Neither the user's settings nor last week's tabs take part.
        private = {
            name: str(folder / "jupyter" / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
        }
        with log.open("w") as out:
            self._process = subprocess.Popen(
                ["make", "lab", f"PY={sys.executable}", f"WORK={self.work}", f"ARGS={OPTIONS}"],
                cwd=project,
                env={**os.environ, **private, "LABSUPPORT_CACHE": str(cache_dir())},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + within
        while not (found := ADDRESS.search(log.read_text())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"`make lab` printed no address:\n{log.read_text()}")
            time.sleep(0.1)
        self.address = found[0]

    def address_of(self, name, workspace):
        """The page of one file, in a workspace of its own: no tab of another test stands there."""
        return self.address.replace("/lab?", f"/lab/workspaces/{workspace}/tree/{name}?") + "&reset"

    def end_kernels(self):
        """End all kernels that tests have left behind."""
        for kernel in json.loads(self._ask("api/kernels")):
            self._ask(f"api/kernels/{kernel['id']}", method="DELETE")

    def _ask(self, path, method="GET"):
        request = urllib.request.Request(self.address.replace("/lab?", f"/{path}?"), method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def end(self):
        """End the server and the kernels; what does not end by itself is killed."""
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in family:
            process.terminate()
        _, left = psutil.wait_procs(family, timeout=20)
        for process in left:
            process.kill()
        self._process.kill()
        self._process.wait()
