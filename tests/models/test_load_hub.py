"""A hub that answers, and a cache that an interrupted download left: nothing half is ever used."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.models.test_generation import words
from tests.models.tiny import tiny

COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def published(tmp_path):
    """A GPT-2 in several files, and its tokenizer, as a hub would have them."""
    folder = tmp_path / "published"
    tiny("gpt2").save_pretrained(folder, max_shard_size="40KB")
    words(bos_token="w01", eos_token="w59", pad_token="w00").save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


@pytest.fixture
def hub(published):
    """The address of a server that speaks as much of the hub's language as downloads need."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            file = published / self.path.partition("?")[0].rpartition("/")[2]
            there = "/resolve/main/" in self.path or f"/resolve/{COMMIT}/" in self.path
            files = sorted(published.iterdir())
            if self.path.startswith("/api/models/acme/tiny/revision/"):
                siblings = [{"rfilename": path.name} for path in files]
                about: object = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
                self.answer(json.dumps(about).encode(), "about")
                return
            if self.path.startswith(f"/api/models/acme/tiny/tree/{COMMIT}?recursive=true"):
                about = [
                    {"type": "file", "path": path.name, "oid": "0", "size": path.stat().st_size}
                    for path in files
                ]
                self.answer(json.dumps(about).encode(), "tree")
                return
            if not (there and file.is_file()):
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.answer(file.read_bytes(), file.name)

        def answer(self, content, name):
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name}-{len(content)}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


CODE = """
import json, sys
from labsupport.models.sources.load import load_model
found = []
for download in json.loads(sys.argv[1]):
    try:
        loaded = load_model("acme/tiny", attention=None, device="cpu", download=download)
        found.append([loaded.source, loaded.tokenizer("w05 w07")["input_ids"]])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""


def load(project, tmp_path, address, *downloads):
    """In a process of its own: where hub and cache are is settled when the library is imported."""
    places = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": address}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(downloads)],
        env={**os.environ, **places, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def cached_without(tmp_path, published, *lost):
    root = tmp_path / "hub" / "models--acme--tiny"
    snapshot = root / "snapshots" / COMMIT
    shutil.copytree(published, snapshot)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for pattern in lost:
        for file in list(snapshot.glob(pattern)):
            file.unlink()
    return snapshot


@pytest.mark.parametrize("lost", [("tokenizer*",), ("model-00002*",)], ids=["tokenizer", "shard"])
def test_a_download_that_was_interrupted_is_said_to_be_so_and_completed(
    project, tmp_path, published, hub, lost
):
    snapshot = cached_without(tmp_path, published, *lost)
    refused, fetched, again = load(project, tmp_path, hub, False, True, False)
    assert refused[0] == "ValueError"
    assert "acme/tiny in the hub's cache" in refused[1]
    assert "download=True (--download) fetches what is missing" in refused[1]
    assert fetched == ["acme/tiny, the weights as published: the hub", [5, 7]]
    assert list(snapshot.glob(lost[0]))
    assert again == ["acme/tiny, the weights as published: the hub's local cache", [5, 7]]


def test_without_the_hub_both_reasons_are_given(project, tmp_path, published):
    cached_without(tmp_path, published, "tokenizer*")
    ((kind, message),) = load(project, tmp_path, "http://127.0.0.1:9", True)
    assert kind == "DownloadError"
    assert "could not be reached for acme/tiny" in message
    assert "(acme/tiny in the hub's cache: " in message
