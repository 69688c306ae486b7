"""A training run on disk: each checkpoint is there as a whole, or not at all, and damage is seen.

    step-000200.<SHA-256 of the file, 64 digits>.pt     200 steps are done
    .step-000300.partial                                being written, or left by a killed run

A program can be killed at any moment, and a computer can lose its power. So a checkpoint is written
under another name and forced to the disk, and only then it gets its own name, in one operation of
the file system (POSIX `rename`: "atomic"). That name holds the hash of the bytes that were meant to
be written: a file that was cut off, or in which one bit has changed, does not fit its name.

What is inside is opened by `torch.load(path, weights_only=True)`, which runs no code from the file.
`sha256sum` shows the same digits as the name.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

_NAME = re.compile(r"step-(\d{6,})\.([0-9a-f]{64})\.pt")


class CheckpointError(RuntimeError):
    """No checkpoint of the folder is whole, or another program uses the folder."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an older one is used."""


class Checkpoints:
    """The checkpoints of one run in one folder.

    Args:
        folder: made when first needed.
        keep: `save` deletes all but so many whole checkpoints, the newest ones. Damaged ones are
            never deleted, and do not count.

    >>> checkpoints = Checkpoints("runs/first")
    >>> checkpoints.save(200, {"model": model.state_dict()})
    >>> state = checkpoints.load_newest()
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, and must be at least 1")
        self.folder = Path(folder)
        self.keep = keep
        # Reading gigabytes to hash them is done once for each file, as long as it looks the same.
        self._seen: dict[tuple[str, int, int], bool] = {}

    def paths(self) -> list[Path]:
        """All checkpoints, damaged ones too, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(
            found, key=lambda path: (step_of(path), path.stat().st_mtime_ns), reverse=True
        )

    def is_whole(self, path: Path) -> bool:
        """Whether a checkpoint's bytes are those that were meant to be written."""
        status = path.stat()
        mark = (path.name, status.st_size, status.st_mtime_ns)
        if mark not in self._seen:
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError:  # a failing disk
                return False
            self._seen[mark] = path.name.split(".")[1] == digest
        return self._seen[mark]

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then delete those that are no longer kept.

        Args:
            step: how many steps are done.
            state: tensors, numbers, strings and None in dictionaries, lists and tuples.

        Returns:
            The file, which is on the disk when this returns.

        Raises:
            OSError: it could not be written (a full disk, for one). The older ones are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".step-{step:06d}.partial"
        try:
            with partial.open("wb") as file:
                sink: Any = _HashingFile(file)
                torch.save(dict(state), sink)
                file.flush()
                os.fsync(file.fileno())
            path = self.folder / f"step-{step:06d}.{sink.digest.hexdigest()}.pt"
            os.replace(partial, path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                # Closing its archive on a full disk, torch.save hides why it had to.
                raise error.__context__ from None
            raise
        _sync_folder(self.folder)
        self._prune()
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, its tensors on the CPU; None if there is no checkpoint.

        Warns:
            CheckpointWarning: newer ones are damaged; it names them. They are left as they are.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        damaged = []
        for path in self.paths():
            if not self.is_whole(path):
                damaged.append(path.name)
                continue
            if damaged:
                warnings.warn(
                    f"{_listed(damaged)} in {self.folder}: it cannot be read, or its SHA-256 is "
                    f"not the one in its name. Using {path.name}, after {step_of(path)} steps.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return torch.load(path, map_location="cpu", weights_only=True)
        if damaged:
            raise CheckpointError(
                f"{_listed(damaged)} in {self.folder}, and there is no other checkpoint. Bring one "
                "back from a copy, or begin anew (fresh=True, --fresh)"
            )
        return None

    def clear(self) -> None:
        """Delete all checkpoints of the folder, damaged and unfinished ones too."""
        for path in (*self.paths(), *self._partial()):
            path.unlink()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other programs from writing here; what a killed program left unfinished is deleted.

        The lock is the operating system's and ends with the program, however that ends.

        Raises:
            CheckpointError: another program trains in this folder.
        """
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise CheckpointError(
                f"another program is training in {self.folder}: wait for it, or choose another "
                "folder"
            ) from None
        try:
            for path in self._partial():
                path.unlink()
            yield
        finally:
            lock.release()

    def _partial(self) -> list[Path]:
        return list(self.folder.glob(".step-*.partial"))

    def _prune(self) -> None:
        # Read back from the disk, the new one too: what is deleted here has been replaced.
        whole = [path for path in self.paths() if self.is_whole(path)]
        for path in whole[self.keep :]:
            path.unlink()


def step_of(path: Path) -> int:
    """The number of steps that were done, from a checkpoint's name."""
    return int(path.name.split(".")[0].removeprefix("step-"))


def random_state(device: torch.device) -> dict[str, Any]:
    """Where Python's, NumPy's and PyTorch's global random numbers are, as plain data."""
    numpy_state: Any = np.random.get_state(legacy=False)
    inner = numpy_state["state"] | {"key": numpy_state["state"]["key"].tolist()}
    return {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": inner},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue the random numbers where `random_state` was taken.

    Those of a GPU are left alone if either run is not on one.
    """
    random.setstate(state["python"])
    inner = state["numpy"]["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**inner, "key": key}})
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


class _HashingFile:
    """A file that hashes what is written to it: the digest is of the bytes that were meant."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _sync_folder(folder: Path) -> None:
    """Force the folder's list of names to the disk, where the system can (Windows cannot)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} damaged"
