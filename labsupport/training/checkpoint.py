"""A training run on disk: each checkpoint is there as a whole, or not at all.

    step-000200.pt           200 steps are done
    .step-000300.partial     being written, or left by a killed run

A checkpoint is written under another name and forced to the disk, and only then gets its own name,
in one operation of the file system (POSIX `rename`: "atomic").
`torch.load(path, weights_only=True)` opens it, and runs no code from the file.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


class CheckpointError(RuntimeError):
    """The newest checkpoint cannot be read, or another program uses the folder."""


class ResumeError(ValueError):
    """The folder holds a run with other settings, or of another model."""


class Checkpoints:
    """The checkpoints of one run in one folder.

    Args:
        folder: made when first needed.
        keep: number of checkpoints that `save` leaves, the newest ones.

    >>> import tempfile
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> file = checkpoints.save(200, {"weight": torch.ones(3)})
    >>> checkpoints.load_newest()["weight"]
    tensor([1., 1., 1.])
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Return all checkpoints, the newest first."""
        return sorted(self.folder.glob("step-*.pt"), key=step_of, reverse=True)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then delete the oldest ones.

        Args:
            step: how many steps are done.
            state: tensors, numbers, strings and None in dictionaries, lists and tuples.

        Returns:
            The file, which is on the disk when this returns.

        Raises:
            OSError, RuntimeError: it could not be written. The older ones are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".step-{step:06d}.partial"
        try:
            with partial.open("wb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
            path = self.folder / f"step-{step:06d}.pt"
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for old in self.paths()[self.keep :]:
            old.unlink()
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """Return the newest checkpoint, its tensors on the CPU; None if there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        paths = self.paths()
        if not paths:
            return None
        try:
            return torch.load(paths[0], map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{paths[0]} cannot be read: {error}. Delete it to go on from the one before, or "
                "start again (fresh=True, --fresh)"
            ) from error

    @contextmanager
    def in_use(self, *, fresh: bool = False) -> Iterator[None]:
        """Keep other programs from writing here; delete what a killed program left unfinished.

        With `fresh`, delete all checkpoints. The lock is the operating system's and ends with the
        program.

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
                f"another program is training in {self.folder}: wait, or choose another folder"
            ) from None
        try:
            for path in [*self.folder.glob(".step-*.partial"), *(self.paths() if fresh else [])]:
                path.unlink()
            yield
        finally:
            lock.release()


def step_of(path: Path) -> int:
    """Return the number of steps that were done, from a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


# --- does a checkpoint belong to this run? --------------------------------------------------------


def model_run_config(model: nn.Module) -> dict[str, Any]:
    """Return a model's shape, if its `config` is a dataclass, and the dtype of its stream.

    Other savings change the memory and the last bits; a stream in 16 bits is another model.
    """
    config = getattr(model, "config", None)
    if not is_dataclass(config) or isinstance(config, type):
        return {}
    shape = {f"model.{name}": value for name, value in asdict(config).items()}
    residual = getattr(getattr(model, "savings", None), "residual", None)
    return shape if residual is None else shape | {"model.residual": str(residual)}


def check_same_run_config(
    saved: Mapping[str, Any], asked: Mapping[str, Any], folder: Path | str | None
) -> None:
    """Raise ResumeError, with the list of differences, unless two runs' settings are the same."""
    different = [
        f"{name} was {saved.get(name)!r} and is {asked.get(name)!r}"
        for name in dict.fromkeys([*saved, *asked])
        if saved.get(name) != asked.get(name)
    ]
    if not different:
        return
    hint = ""
    if saved["decay_steps"] != asked["decay_steps"]:
        hint = f" (for another number of steps, keep decay_steps={saved['decay_steps']})"
    raise ResumeError(
        f"{folder} holds a run with other settings: {'; '.join(different)}{hint}. Give it the "
        "same settings, or another folder, or start again (fresh=True, --fresh)"
    )
