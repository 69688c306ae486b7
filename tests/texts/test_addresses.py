"""`make links`: which addresses it collects, and what it says of one that is gone."""

import http.server
import threading

import pytest

from scripts import links, texts


def test_addresses_of_pages_docstrings_and_hardware_are_collected_with_their_places():
    places = links.addresses()
    found = {place.split(":")[0] for where in places.values() for place in where}
    assert {"theory/references.md", "data/hardware.csv"} <= found
    assert any(place.startswith("labsupport/") for place in found)
    for address, where in places.items():
        assert address.startswith("https://")
        assert "#" not in address
        for place in where:
            file, line = place.rsplit(":", 1)
            assert 1 <= int(line) <= len((texts.ROOT / file).read_text().splitlines())


@pytest.fixture
def site():
    """A server on this machine with one page, and one that it shows to nobody."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response({"/there": 200, "/closed": 403}.get(self.path, 404))
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # The checker hangs up as soon as it knows: that is no error.
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_page_that_is_gone_is_told_from_one_that_is_there(site, tmp_path, monkeypatch):
    pytest.importorskip("sphinx", reason="comes with `make book`")
    pytest.importorskip("myst_parser", reason="comes with `make book`")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    said = links.follow([f"{site}/there", f"{site}/gone", f"{site}/closed"], tmp_path)
    assert said[f"{site}/there"][0] == "working"
    assert said[f"{site}/gone"][0] == "broken"
    assert not links.REFUSED.search(said[f"{site}/gone"][1].replace(site, ""))
    assert links.REFUSED.search(said[f"{site}/closed"][1].replace(site, ""))
