"""Distributed checkpoints: each rank writes its part, and any number of ranks can read it.

    step-000200/
        .metadata            which file holds which rows of which tensor
        __0_0.distcp         what rank 0 wrote
        __1_0.distcp         what rank 1 wrote
        run.json             the steps done, the course, the history
    partial-000300/          being written, or left by a killed run

`get_model_state_dict` and `get_optimizer_state_dict` give tensors by the names of the parameters,
whether the model is whole, in DDP or sharded. `torch.distributed.checkpoint` writes which rows each
shard is; when it loads, a rank reads those rows that it needs now. So a run of two ranks goes on
with one, or with eight; and what DDP saved, FSDP can load.

A checkpoint gets its name when all ranks have written theirs: it is there as a whole, or not at
all. The folder must be one that all ranks see. (The loop on one device also sees damaged files:
`labsupport.training.checkpoint`. This one leaves that to the file system.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from labsupport.distributed.data_parallel.process_group import Place
from labsupport.training.checkpoint import CheckpointError, Checkpoints
from labsupport.training.history import History
from labsupport.training.train import check_same_course

_NAME = re.compile(r"step-(\d{6,})")


class DistributedCheckpoints:
    """The checkpoints of one run in one folder; every rank calls every method.

    Args:
        folder: the same for all ranks; made when first needed.
        place: this rank's.
        course: what the weights depend on; a run with another one is not resumed.
        keep: so many are kept, the newest ones.
    """

    def __init__(
        self, folder: Path | str, place: Place, course: Mapping[str, Any], *, keep: int = 2
    ) -> None:
        self.folder, self.place, self.keep = Path(folder), place, keep
        self.course = json.loads(json.dumps(course))  # as it will be read back: lists, no tuples
        self._lock = ExitStack()

    def open(self, *, fresh: bool) -> None:
        """Keep other programs out, and delete what a killed run left; with `fresh`, all of it.

        Raises:
            CheckpointError: on rank 0, if another program trains here.
        """
        if self.place.rank == 0:
            self._lock.enter_context(Checkpoints(self.folder).in_use())
            old = list(self.folder.glob("partial-*")) + (self.paths() if fresh else [])
            for path in old:
                shutil.rmtree(path)
        self.place.wait_for_all()

    def close(self) -> None:
        """Let other programs in."""
        self._lock.close()

    def paths(self) -> list[Path]:
        """All whole checkpoints, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, history: History
    ) -> Path:
        """Write what is there after so many steps; when this returns it is on the disk."""
        partial = self.folder / f"partial-{step:06d}"
        path = self.folder / f"step-{step:06d}"
        dcp.save(_state(model, optimizer), checkpoint_id=str(partial))
        self.place.wait_for_all()
        if self.place.rank == 0:
            run = {
                "step": step,
                "ranks": self.place.world,
                "course": self.course,
                "history": history.state(),
            }
            with (partial / "run.json").open("w", encoding="utf-8") as file:
                json.dump(run, file)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            for old in self.paths()[self.keep :]:
                shutil.rmtree(old)
        self.place.wait_for_all()
        return path

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> History | None:
        """Fill the model and the optimizer, each rank its part; None if there is nothing yet.

        Raises:
            ResumeError: the run took another course.
            CheckpointError: its files cannot be read, or are of another model.
        """
        paths = self.paths()
        if not paths:
            return None
        try:
            run = json.loads((paths[0] / "run.json").read_text(encoding="utf-8"))
            check_same_course(run["course"], self.course, self.folder)
            state = _state(model, optimizer)
            dcp.load(state, checkpoint_id=str(paths[0]))
        except (OSError, KeyError, json.JSONDecodeError, dcp.CheckpointException) as error:
            raise CheckpointError(
                f"{paths[0]} cannot be loaded: {error}. Delete it to go on from the one before, or "
                "begin anew (fresh=True)"
            ) from error
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return History.from_state(run["history"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
