"""Real models, loaded once; packages that pip finds on this machine."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from labsupport.models.sources.packages import Package


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


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder in which pip looks for packages, and nowhere else."""
    (tmp_path / "shelf").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


def publish(shelf: Path, name: str, text: str) -> Package:
    """Lay a wheel with one file, data.txt, on the shelf."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.0.dist-info"
    files = {
        f"{module}/data.txt": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = shelf / f"{module}-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as box:
        for inside, content in files.items():
            box.writestr(inside, content)
        box.writestr(f"{info}/RECORD", "".join(f"{inside},,\n" for inside in files))
    return described(path, "pypi", name, f"{module}/data.txt")


def described(path: Path, registry: str, name: str, *files: str) -> Package:
    """Say of a package's file what the lab knows of one."""
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return Package(registry, name, "1.0.0", len(content), sha256, files, "MIT")
