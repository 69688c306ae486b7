"""Downloads from a web server on this machine, which breaks off, lies and falls silent."""

import base64
import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest

from labsupport.models.sources.download import ATTEMPTS, DownloadError, digest, download
from labsupport.models.sources.packages import Package, fetch_package, unpack

CONTENT = random.Random(0).randbytes(700_000)
FACTS = {"size": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens


@pytest.fixture
def url(server):
    return server.add("/file.bin", CONTENT)


@pytest.fixture
def get(url, tmp_path):
    """Download the file, with no pauses to speak of."""

    def get():
        return download(url, tmp_path / "here" / "file.bin", **FACTS, pause_s=0.001)

    return get


def lying_around(tmp_path):
    return {path.name for path in (tmp_path / "here").iterdir()} - {"file.bin.lock"}


def test_a_file_arrives_whole_and_is_not_asked_for_again(get, server, tmp_path):
    assert get().read_bytes() == CONTENT
    get()
    assert server.asked == [("/file.bin", None)]
    assert lying_around(tmp_path) == {"file.bin"}


def test_a_damaged_file_under_the_final_name_is_fetched_anew(get, tmp_path):
    get().write_bytes(CONTENT[:-1] + b"?")
    assert get().read_bytes() == CONTENT


def test_broken_connections_are_taken_up_where_they_broke(get, server):
    server.script = [{"stop_after": 300_000}, {"stop_after": 100_000}]
    assert get().read_bytes() == CONTENT
    assert [part for _, part in server.asked] == [None, "bytes=300000-", "bytes=400000-"]


def test_more_breaks_than_attempts_are_fine_while_each_brings_something(get, server):
    server.script = [{"stop_after": 10_000}] * (3 * ATTEMPTS)
    assert get().read_bytes() == CONTENT


def test_a_later_call_goes_on_where_an_interrupted_one_stopped(get, server, tmp_path):
    server.script = [{"stop_after": 500_000}, *[{"stop_after": 0}] * ATTEMPTS]
    with pytest.raises(DownloadError, match="500,000 of 700,000 bytes are here"):
        get()
    assert lying_around(tmp_path) == {"file.bin.part"}
    server.asked.clear()
    assert get().read_bytes() == CONTENT
    assert server.asked == [("/file.bin", "bytes=500000-")]


def test_a_server_that_cannot_resume_begins_again(get, server):
    server.script = [{"stop_after": 300_000}, {"whole": True}]
    assert get().read_bytes() == CONTENT


def test_a_server_that_answers_with_another_part_is_not_believed(get, server):
    server.script = [{"stop_after": 300_000}, {"from": 100_000}]
    assert get().read_bytes() == CONTENT
    assert [part for _, part in server.asked] == [None, "bytes=300000-", None]


def test_a_server_that_brings_the_same_piece_again_and_again_is_given_up(get, server):
    server.script = [{"stop_after": 300_000}, {"status": 416}] * 20
    with pytest.raises(DownloadError, match="could not be fetched"):
        get()
    assert len(server.asked) < 2 * ATTEMPTS


def test_a_part_that_is_no_beginning_of_the_file_is_thrown_away(get, server, tmp_path):
    (tmp_path / "here").mkdir()
    part = tmp_path / "here" / "file.bin.part"
    part.write_bytes(CONTENT + b"too long")
    assert get().read_bytes() == CONTENT
    (tmp_path / "here" / "file.bin").unlink()
    part.write_bytes(b"another file" * 1000)
    with pytest.raises(DownloadError, match="not the expected file"):
        get()
    assert get().read_bytes() == CONTENT
    (tmp_path / "here" / "file.bin").unlink()
    part.write_bytes(CONTENT[:-5])
    server.script = [{"status": 416}]
    assert get().read_bytes() == CONTENT


def test_wrong_content_of_the_right_length_is_deleted_and_both_hashes_are_named(
    get, server, tmp_path
):
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    server.script = [{"content": wrong}]
    with pytest.raises(DownloadError) as caught:
        get()
    assert FACTS["sha256"] in str(caught.value)
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert lying_around(tmp_path) == set()


@pytest.mark.parametrize("content", [b"please log in", CONTENT + b"more"])
def test_a_file_of_another_length_is_refused_before_it_is_read(get, server, tmp_path, content):
    server.script = [{"content": content}]
    with pytest.raises(
        DownloadError, match=f"has {len(content):,} bytes, not the expected 700,000"
    ):
        get()
    assert lying_around(tmp_path) == set()


def test_what_is_not_there_is_asked_for_once_only(get, server):
    server.files.clear()
    with pytest.raises(DownloadError, match="HTTP 404"):
        get()
    assert len(server.asked) == 1


def test_a_busy_server_is_asked_again(get, server):
    server.script = [{"status": 503}, {"status": 429}]
    assert get().read_bytes() == CONTENT


def test_without_a_network_the_error_names_the_address_and_the_reason(tmp_path):
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9/a could not be fetched: .*refused"):
        download(f"{NOBODY}/a", tmp_path / "a", **FACTS, pause_s=0.001)


def test_the_proxy_of_the_environment_is_used(server, tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.address)
    server.files["http://far.invalid/a"] = CONTENT
    assert download("http://far.invalid/a", tmp_path / "a", **FACTS).read_bytes() == CONTENT


def test_other_kinds_of_address_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must begin with https"):
        download((tmp_path / "a").as_uri(), tmp_path / "b", **FACTS)


def test_two_processes_at_once_fetch_the_file_once(url, server, tmp_path, project):
    place = tmp_path / "here" / "file.bin"
    code = (
        "import sys; from labsupport.models.sources.download import download;"
        "download(sys.argv[1], sys.argv[2], size=int(sys.argv[3]), sha256=sys.argv[4])"
    )
    command = [sys.executable, "-c", code, url, str(place), str(len(CONTENT)), FACTS["sha256"]]
    running = [subprocess.Popen(command, cwd=project) for _ in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert place.read_bytes() == CONTENT
    assert len(server.asked) == 1


# --- packages -----------------------------------------------------------------------------------


def wheel(folder, name="lab_test_package", version="1.0"):
    """A wheel that pip accepts, with one file in it."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/data.bin": CONTENT,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as box:
        for inside, content in files.items():
            box.writestr(inside, content)
        box.writestr(f"{info}/RECORD", "".join(f"{inside},,\n" for inside in files))
    return path


def tarball(path, members):
    with tarfile.open(path, "w:gz") as box:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            box.addfile(member, io.BytesIO(content))
    return path


def described(path, registry, name, version, url):
    return Package(
        registry=registry,
        name=name,
        version=version,
        url=f"{url}/{path.name}",
        size=path.stat().st_size,
        sha256=digest(path),
        files=(),
        license="MIT",
    )


@pytest.fixture
def pypi_package(tmp_path, monkeypatch):
    """A package that only pip can find: no server has it, but a folder that pip is told of."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return described(wheel(shelf), "pypi", "lab-test-package", "1.0", NOBODY)


def test_pip_finds_what_a_direct_connection_does_not(pypi_package, tmp_path):
    got = fetch_package(pypi_package, tmp_path, pause_s=0.001)
    assert got == tmp_path / "lab_test_package-1.0-py3-none-any.whl"
    assert digest(got) == pypi_package.sha256


def test_what_pip_brings_is_checked_too(pypi_package, tmp_path):
    other = replace(pypi_package, sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"`python.*not the expected file"):
        fetch_package(other, tmp_path, pause_s=0.001)
    assert not list(tmp_path.glob("*.whl"))


def test_when_both_ways_fail_both_reasons_are_given(pypi_package, tmp_path):
    missing = replace(pypi_package, version="9.9")
    with pytest.raises(DownloadError) as caught:
        fetch_package(missing, tmp_path, pause_s=0.001)
    assert "127.0.0.1:9" in str(caught.value)
    assert "No matching distribution" in str(caught.value)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_finds_what_a_direct_connection_does_not(server, tmp_path, monkeypatch):
    named = json.dumps({"name": "lab-test-package", "version": "1.0.0"}).encode()
    (tmp_path / "shelf").mkdir()
    path = tarball(
        tmp_path / "shelf" / "lab-test-package-1.0.0.tgz",
        {"package/package.json": named, "package/data.bin": CONTENT},
    )
    tar_url = server.add("/lab-test-package/-/lab-test-package-1.0.0.tgz", path.read_bytes())
    sha512 = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    version = json.loads(named) | {"dist": {"tarball": tar_url, "integrity": f"sha512-{sha512}"}}
    entry = {"name": "lab-test-package", "dist-tags": {"latest": "1.0.0"}}
    server.add("/lab-test-package", json.dumps(entry | {"versions": {"1.0.0": version}}).encode())
    monkeypatch.setenv("npm_config_registry", server.address)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    package = described(path, "npm", "lab-test-package", "1.0.0", NOBODY)
    assert digest(fetch_package(package, tmp_path, pause_s=0.001)) == package.sha256


def test_only_named_files_are_unpacked_under_their_last_names(tmp_path):
    zipped = wheel(tmp_path)
    tarred = tarball(tmp_path / "a.tgz", {"package/src/a.bin": b"a", "package/b.bin": b"b"})
    to = tmp_path / "to"
    to.mkdir()
    assert unpack(zipped, ["lab_test_package/data.bin"], to) == [to / "data.bin"]
    assert unpack(tarred, ["package/src/a.bin"], to) == [to / "a.bin"]
    assert {path.name for path in to.iterdir()} == {"data.bin", "a.bin"}
    assert (to / "data.bin").read_bytes() == CONTENT


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
    with pytest.raises(DownloadError, match=r"lacks a file.*no-such\.bin"):
        unpack(wheel(tmp_path), ["no-such.bin"], tmp_path)
    (tmp_path / "broken.tgz").write_bytes(b"no archive")
    with pytest.raises(DownloadError, match=r"broken\.tgz is broken"):
        unpack(tmp_path / "broken.tgz", ["a"], tmp_path)
