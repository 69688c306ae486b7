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
    hidden = shutil.ignore_patterns(".git", ".venv", "work", "build", "__pycache__", ".*_cache")
    return shutil.copytree(project, tmp_path / "lab", ignore=hidden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "within"),
    [(f"PY={sys.executable}", 60), ("TORCH=cpu", 900)],
    ids=["this Python", "fresh clone"],
)
def test_make_lab_shows_the_student_edition_and_runs_the_right_kernel(
    checkout, tmp_path, variable, within
):
    # In the home directory is a broken kernel that bears the name of the lab's.
    kernel = tmp_path / "home" / ".local" / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "Broken", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    port = free_port()
    options = f"--no-browser --ServerApp.port={port} --ServerApp.port_retries=0"
    # The models are not fetched anew for a home directory that is thrown away.
    own = {"HOME": str(tmp_path / "home"), "LABSUPPORT_CACHE": str(cache_dir())}
    process = subprocess.Popen(
        ["make", "lab", f"ARGS={options} --IdentityProvider.token=secret", variable],
        cwd=checkout, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip

    def ask(path):
        url = f"http://127.0.0.1:{port}/api/{path}?token=secret"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def is_up():
        try:
            return ask("status")
        except OSError:
            return None

    try:
        deadline = time.monotonic() + within
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                pytest.fail(f"no server came up:\n{process.communicate()[0]}")
            time.sleep(0.2)
        shown = {entry["name"] for entry in ask("contents")["content"]}
        solved = {path.name for path in (checkout / "notebooks").glob("*.ipynb")}
        assert shown == solved | {"further", "theory", "Checklist.md"}
        pages = {entry["name"] for entry in ask("contents/theory")["content"]}
        assert {page.name for page in (checkout / "theory").glob("*.md")} <= pages
        figure = f"http://127.0.0.1:{port}/files/theory/figures/inference-bounds.png?token=secret"
        with urllib.request.urlopen(figure, timeout=10) as answer:
            assert answer.headers["Content-Type"] == "image/png"
        first = json.dumps(ask(f"contents/{min(shown)}"))
        assert "raise NotImplementedError" in first
        assert "BEGIN SOLUTION" not in first
        kernel = ask("kernelspecs")["kernelspecs"]["python3"]["spec"]
        assert kernel["display_name"] != "Broken"
        assert variable.startswith("PY=") or (checkout / ".venv" / ".ready").exists()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=30)
