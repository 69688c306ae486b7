"""A training run on disk: each checkpoint is there as a whole, or not at all.

    step-000200/             200 steps are done
        .metadata            which file holds which rows of which tensor
        __0_0.distcp         what rank 0 wrote
        run.json             the run's configuration and its history
    partial-000300/          being written, or left by a killed run

`torch.distributed.checkpoint` writes the tensors: each rank its own part, or one process all of it.
A rank reads those rows that it needs now, so any number of ranks can go on with a run. All files
are forced to the disk before the folder gets its name, in one operation of the file system (POSIX
`rename`: "atomic"). Ranks need a folder that all of them see.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from labsupport.profiling.units import format_bytes


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written, or another program uses the folder."""


class ResumeError(ValueError):
    """The folder holds a run with other settings, or of another model."""


class Checkpoints:
    """The checkpoints of one run in one folder; every rank calls every method but `paths`.

    Args:
        folder: made when first needed; the same for all ranks.
        keep: number of checkpoints that `save` leaves, the newest ones.
        group: the ranks that train together; None: this process alone.

    Raises:
        CheckpointError: the folder holds a run of an older version of the lab.
        ValueError: keep is below 1.

    >>> import tempfile
    >>> import torch
    >>> checkpoints, weight = Checkpoints(tempfile.mkdtemp()), torch.ones(3)
    >>> checkpoints.save(200, {"weight": weight}, {"data": "topics"})
    >>> weight.zero_()
    tensor([0., 0., 0.])
    >>> checkpoints.load({"weight": weight})
    >>> weight, checkpoints.run()
    (tensor([1., 1., 1.]), {'data': 'topics'})
    """

    def __init__(
        self, folder: Path | str, *, keep: int = 2, group: dist.ProcessGroup | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least 1 checkpoint, the newest")
        self.folder, self.keep, self.group = Path(folder), keep, group
        self.first = group is None or dist.get_rank(group) == 0
        if next(self.folder.glob("step-*.pt"), None) is not None:
            raise CheckpointError(
                f"{folder} holds a run of an older version of the lab (step-*.pt), which this one "
                "cannot read: use another folder"
            )

    def paths(self) -> list[Path]:
        """Return all whole checkpoints, the newest first."""
        found = (path for path in self.folder.glob("step-*") if path.name[5:].isdigit())
        return sorted(found, key=step_of, reverse=True)

    def _newest(self) -> Path:
        if not (paths := self.paths()):
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        return paths[0]

    def save(self, step: int, state: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        """Write a checkpoint, then delete the oldest ones.

        Args:
            step: how many steps are done.
            state: tensors by name; of a `DTensor` each rank writes its part.
            run: plain data, the same on all ranks.

        Raises:
            CheckpointError: it could not be written. The older ones are untouched.
            ValueError: step is below 0.
        """
        if step < 0:
            raise ValueError(f"step is {step}: 0 or more steps are done")
        partial, failure = self.folder / f"partial-{step:06d}", None
        try:
            self._call(dcp.save, state, partial)
            if self.first:
                with (partial / "run.json").open("w", encoding="utf-8") as file:
                    json.dump(run, file)
                    file.flush()
                    os.fsync(file.fileno())
                partial.rename(self.folder / f"step-{step:06d}")
                for old in self.paths()[self.keep :]:
                    shutil.rmtree(old)
        except (OSError, dcp.CheckpointException) as error:
            failure = _cause(error)
        # Also a barrier: nobody goes on before the checkpoint has its name.
        failures = gather(failure, self.group)
        if any(failures):
            shutil.rmtree(partial, ignore_errors=True)
            said: str = next(filter(None, failures))
            with suppress(OSError):
                said += f" ({format_bytes(shutil.disk_usage(self.folder).free)} are free there)"
            raise CheckpointError(f"step {step} cannot be saved in {self.folder}: {said}")

    def run(self) -> dict[str, Any] | None:
        """Return what `save` was given as `run`, of the newest checkpoint; None if there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        paths = self.paths()
        if not paths:
            return None
        with _readable(paths[0]):
            return json.loads((paths[0] / "run.json").read_text(encoding="utf-8"))

    def names(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the newest checkpoint's tensors, by name.

        Raises:
            CheckpointError: it cannot be read.
        """
        return {name: tuple(getattr(about, "size", ())) for name, about in self._about().items()}

    def _about(self) -> Mapping[str, Any]:
        path = self._newest()
        with _readable(path):
            return dcp.FileSystemReader(path).read_metadata().state_dict_metadata

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Read the newest checkpoint into these tensors, in place.

        Raises:
            CheckpointError: it cannot be read, or there is none.
            ResumeError: a tensor was saved in another dtype.
        """
        path, about = self._newest(), self._about()
        for name, tensor in state.items():
            saved = getattr(about.get(name), "properties", tensor).dtype
            if saved != tensor.dtype:
                raise ResumeError(f"{path} holds {name} in {saved}, and here it is {tensor.dtype}")
        with _readable(path):
            self._call(dcp.load, state, path)

    def _call(self, operation: Any, state: Mapping[str, Tensor], path: Path) -> None:
        with warnings.catch_warnings():
            # One process needs no process group; PyTorch warns that there is none.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
            where: dict[str, Any] = {"process_group": self.group, "no_dist": self.group is None}
            operation(dict(state), checkpoint_id=str(path), **where)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other programs from writing here; delete what a killed program left unfinished.

        The lock is the operating system's and ends with the program.

        Raises:
            CheckpointError: another program trains in this folder; on all ranks.
        """
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        lock, free = FileLock(self.folder / ".lock"), True
        if self.first:
            try:
                lock.acquire(timeout=0)
                for path in self.folder.glob("partial-*"):
                    shutil.rmtree(path)
            except Timeout:
                free = False
        try:
            if not all(gather(free, self.group)):
                raise CheckpointError(
                    f"another program is training in {self.folder}: wait, or choose another folder"
                )
            yield
        finally:
            lock.release()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint into one that says what to do."""
    try:
        yield
    except (
        *(OSError, EOFError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError),
        dcp.CheckpointException,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read: {_cause(error)}. Delete it to go on from the one before, or "
            "delete the run's folder to start again"
        ) from error


def _cause(error: BaseException) -> str:
    """Return a rank's own error as text, where `torch.distributed.checkpoint` has wrapped it."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if "inline_container" in str(error):  # PyTorch's writer of files
        return "a file could not be written whole: is the disk full, or a quota reached?"
    return repr(error)


def step_of(path: Path) -> int:
    """Return the number of steps that were done, from a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def gather(local: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's object, in the order of the ranks; without a group this one alone."""
    if group is None:
        return [local]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    return gathered


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
    saved: Mapping[str, Any], asked: Mapping[str, Any], folder: Path | str
) -> None:
    """Raise ResumeError, with the list of differences, unless two runs' settings are the same."""
    different = [
        f"{name} was {saved.get(name)!r} and is {asked.get(name)!r}"
        for name in dict.fromkeys([*saved, *asked])
        # As text, in which NaN is NaN.
        if repr(saved.get(name)) != repr(asked.get(name))
    ]
    if not different:
        return
    hint = ""
    if saved["decay_steps"] != asked["decay_steps"]:
        hint = f" (for another number of steps, keep decay_steps={saved['decay_steps']})"
    raise ResumeError(
        f"{folder} holds a run with other settings: {'; '.join(different)}{hint}. Give it the "
        "same settings, or another folder"
    )


def check_same_tensors(
    saved: Mapping[str, tuple[int, ...]], asked: Mapping[str, Tensor], folder: Path | str
) -> None:
    """Raise ResumeError, with the first differences, unless all tensors have the same shapes."""
    here = {name: tuple(tensor.shape) for name, tensor in asked.items()}
    different = [
        f"{name} was {saved.get(name)} and is {here.get(name)}"
        for name in sorted(saved.keys() | here.keys())
        if saved.get(name) != here.get(name)
    ]
    if different:
        raise ResumeError(f"{folder} holds a run of another model: {'; '.join(different[:4])}")
