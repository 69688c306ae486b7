"""Distributed checkpoints: each rank writes its part, and any number of ranks can read it.

    step-000200/
        .metadata            which file holds which rows of which tensor
        __0_0.distcp         what rank 0 wrote
        run.json             the steps done, the run's configuration, the history
    partial-000300/          being written, or left by a killed run

Tensors go by the names of the parameters, and a rank loads those rows that it needs now: what DDP
saved on two ranks, FSDP can load on eight. The folder must be one that all ranks see.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labsupport.distributed.process_group import RankInfo
from labsupport.training.checkpoint import CheckpointError, Checkpoints
from labsupport.training.history import History
from labsupport.training.train import check_same_run_config


class DistributedCheckpoints:
    """The checkpoints of one run in one folder; every rank calls every method.

    `folder` is the same for all ranks; a run with another `run_config` is not resumed; the newest
    `keep` checkpoints stay.
    """

    def __init__(
        self, folder: Path | str, info: RankInfo, run_config: Mapping[str, Any], *, keep: int = 2
    ) -> None:
        self.folder, self.info, self.keep = Path(folder), info, keep
        self.run_config = json.loads(json.dumps(run_config))  # as it is read back: lists, no tuples

    @contextmanager
    def in_use(self, *, fresh: bool) -> Iterator[None]:
        """Lock the folder, and delete what a killed run left; with `fresh`, delete all of it.

        Raises:
            CheckpointError: on rank 0, if another program trains here.
        """
        with Checkpoints(self.folder).in_use() if self.info.rank == 0 else nullcontext():
            if self.info.rank == 0:
                for path in [*self.folder.glob("partial-*"), *(self.paths() if fresh else [])]:
                    shutil.rmtree(path)
            self.info.barrier()
            yield

    def paths(self) -> list[Path]:
        """Return all whole checkpoints, the newest first."""
        steps = self.folder.glob("step-*")
        return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, history: History
    ) -> None:
        """Write the state after that many steps."""
        partial = self.folder / f"partial-{step:06d}"
        dcp.save(_state(model, optimizer), checkpoint_id=str(partial))
        self.info.barrier()
        if self.info.rank == 0:
            run = {"step": step, "ranks": self.info.world, "run_config": self.run_config}
            run["history"] = history.state()
            (partial / "run.json").write_text(json.dumps(run), encoding="utf-8")
            partial.rename(self.folder / f"step-{step:06d}")
            for old in self.paths()[self.keep :]:
                shutil.rmtree(old)
        self.info.barrier()

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> History | None:
        """Fill the model and the optimizer, each rank its part; None if there is nothing yet.

        Raises:
            ResumeError: the run had other settings.
            CheckpointError: its files cannot be read, or are of another model.
        """
        paths = self.paths()
        if not paths:
            return None
        try:
            run = json.loads((paths[0] / "run.json").read_text(encoding="utf-8"))
            check_same_run_config(run["run_config"], self.run_config, self.folder)
            state = _state(model, optimizer)
            dcp.load(state, checkpoint_id=str(paths[0]))
        except (OSError, KeyError, json.JSONDecodeError, dcp.CheckpointException) as error:
            raise CheckpointError(
                f"{paths[0]} cannot be loaded: {error}. Delete it to go on from the one before, or "
                "start again (fresh=True)"
            ) from error
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **loaded)
        return History.from_state(run["history"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
