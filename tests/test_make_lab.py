"""`make lab`, run for real: what a student's browser would be shown."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from labsupport.paths import cache_dir


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def checkout(project, tmp_path):
    """A fresh copy of the project, as `git clone` makes it."""
    copy = tmp_path / "lab"
    hidden = shutil.ignore_patterns(".git", ".venv", "work", "__pycache__", ".*_cache")
    shutil.copytree(project, copy, ignore=hidden)
    return copy


@pytest.fixture
def home(tmp_path):
    """A home directory with a broken kernel that bears the name of the lab's."""
    kernel = tmp_path / "home" / ".local" / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "Broken", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    return tmp_path / "home"


@pytest.fixture
def lab(checkout, home):
    """Start `make lab`, and return how to ask its server; the server ends with the test."""
    started = []

    def start(*variables, within):
        port = free_port()
        options = f"--no-browser --ServerApp.port={port} --ServerApp.port_retries=0"
        process = subprocess.Popen(
            ["make", "lab", f"ARGS={options} --IdentityProvider.token=secret", *variables],
            cwd=checkout,
            # The models are not fetched anew for a home directory that is thrown away.
            env={**os.environ, "HOME": str(home), "LABSUPPORT_CACHE": str(cache_dir())},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)

        def ask(path):
            url = f"http://127.0.0.1:{port}/api/{path}?token=secret"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)

        deadline = time.monotonic() + within
        while True:
            try:
                ask("status")
                return ask
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    pytest.fail(f"no server came up:\n{process.communicate()[0]}")
                time.sleep(0.2)

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=30)


def look_around(ask, checkout):
    solved = {path.name for path in (checkout / "notebooks").glob("*.ipynb")}
    shown = {entry["name"] for entry in ask("contents")["content"]}
    assert shown == solved | {"theory", "Checklist.md"}
    pages = {entry["name"] for entry in ask("contents/theory")["content"]}
    assert {page.name for page in (checkout / "theory").glob("*.md")} <= pages
    assert "raise NotImplementedError" in json.dumps(ask(f"contents/{min(shown)}"))
    assert "BEGIN SOLUTION" not in json.dumps(ask(f"contents/{min(shown)}"))
    kernel = ask("kernelspecs")["kernelspecs"]["python3"]["spec"]
    assert kernel["display_name"] != "Broken"


def test_make_lab_shows_the_student_edition_and_runs_the_right_kernel(lab, checkout):
    look_around(lab(f"PY={sys.executable}", within=60), checkout)


@pytest.mark.slow
def test_make_lab_works_on_a_fresh_clone(lab, checkout):
    look_around(lab("TORCH=cpu", within=900), checkout)
    assert (checkout / ".venv" / ".ready").exists()
