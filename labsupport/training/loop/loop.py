"""The training loop: one optimizer step, and the run of them.

Step k of a run depends on nothing but the weights, the optimizer's state, the random numbers, and
k: batches and learning rate are functions of k. So a run that was killed, and goes on from its last
checkpoint, takes the same steps as one that was not; on a CPU, with the same number of threads, bit
for bit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labsupport.precision import (
    FlashAttentionConfig,
    MixedPrecisionOptimizer,
    apply_precision_policy,
)
from labsupport.training.documents.packing import IGNORED
from labsupport.training.loop.checkpoints import Checkpoints, random_state, set_random_state
from labsupport.training.loop.history import History, StepRow, read_peak, reset_peak
from labsupport.training.loop.inputs import (
    check_plain,
    check_same_course,
    check_same_shapes,
    check_weights,
    label_counts,
    model_course,
    tensors,
)
from labsupport.training.loop.settings import TrainSettings, learning_rate, parameter_groups


class TrainingDivergedError(RuntimeError):
    """A loss or a gradient is NaN or infinite. The step was not taken: the weights are good.

    Attributes:
        step: counted from 0.
        micro_batch: the first one that shows it when it runs alone; None if none does.
        history: of the steps before: its curves often show where the trouble began.
    """

    def __init__(self, message: str, step: int, micro_batch: int | None, history: History) -> None:
        super().__init__(message)
        self.step = step
        self.micro_batch = micro_batch
        self.history = history


def train(
    model: nn.Module,
    batches: Callable[[int], Iterable[Any]],
    settings: TrainSettings,
    *,
    folder: Path | str | None = None,
    fresh: bool = False,
    course: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = True,
) -> History:
    """Train a model with AdamW; with a folder, go on where a run in it ended.

    Args:
        model: on its device, with float32 weights; `settings.policy` is applied to it, and stays.
            `model(**batch)` returns the mean loss over the labels that are not -100, a scalar.
        batches: step (counted from 0) -> `settings.accumulation` micro-batches: dataclasses or
            mappings of tensors, `tokens` and `labels` (any shape, int64) among them, on any device.
            For each step always the same ones.
        settings: how to train, and in which dtypes.
        folder: for checkpoints. If a run is in it, that run goes on, with its own random numbers;
            if that run is complete, nothing is done.
        fresh: delete the checkpoints in the folder and begin anew.
        course: what else the weights depend on, by name, as plain values (which texts, for one);
            it is saved, and must be equal when the run is resumed. A model's `config`, if that is a
            dataclass, is part of it anyway.
        on_step: called with each step's row, before its checkpoint.
        progress: show a bar, on stderr.

    Returns:
        The history of the whole run, with the steps before a resumption.

    The random numbers (Python's, NumPy's, PyTorch's) are seeded at the beginning. The model is left
    in training mode. On a GPU each step resets PyTorch's peak of memory.

    Raises:
        TrainingDivergedError: NaN or infinity, before the step's update. With float16, gradients
            that overflow are expected: such a step is skipped and the loss scaled down, and this is
            raised once there is nothing left to scale.
        ResumeError: the folder's run had other settings, or another model; names the differences.
        CheckpointError: no checkpoint in the folder is whole, or another program trains there.
        ValueError: weights that are not float32 (or float64) and under no policy, none that needs
            gradients, a step without labels, or another number of micro-batches than
            `accumulation`.
        TypeError: a batch that is neither a dataclass nor a mapping of tensors with tokens and
            labels; a value of `course` that is not plain.

    >>> settings = TrainSettings(steps=100, autocast=torch.bfloat16, checkpoint_every=20)
    >>> history = train(model, batches, settings, folder="runs/first")
    >>> history.chart()
    """
    check_weights(model, settings.policy)
    course = settings.course() | model_course(model) | dict(course or {})
    check_plain(course)
    checkpoints = None if folder is None else Checkpoints(folder, keep=settings.keep)
    with nullcontext() if checkpoints is None else checkpoints.in_use():
        if checkpoints is not None and fresh:
            checkpoints.clear()
        saved = None if checkpoints is None else checkpoints.load_newest()
        if saved is not None:
            check_same_course(saved["course"], course, folder)
            check_same_shapes(saved["model"], model.state_dict())
        run = _Run(model, settings)
        if saved is None:
            random.seed(settings.seed)
            np.random.seed(settings.seed % 2**32)
            torch.manual_seed(settings.seed)
        else:
            run.load_state(saved)
            del saved
        model.train()
        with progress_bar(run.history, settings, shown=progress) as bar:
            for step in range(len(run.history), settings.steps):
                row = run.step(step, batches)
                run.history.rows.append(row)
                bar.set_postfix_str(f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tokens/s")
                bar.update()
                if on_step is not None:
                    on_step(row)
                if checkpoints is not None and settings.saves_after(step):
                    checkpoints.save(step + 1, run.state() | {"course": course})
    return run.history


class _Run:
    """All that a step changes: weights, optimizer, loss scale, history."""

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        self.model = model
        self.settings = settings
        self.history = History()
        if settings.policy is not None:
            apply_precision_policy(model, settings.policy)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = sorted(trained, key=lambda name: trained[name].ndim < 2)  # in their groups' order
        self.device = next(iter(trained.values())).device
        # It does for each run what the run's dtypes ask for. Without a policy all weights are
        # float32 and their own masters; and float16 is float16, be it a policy's or autocast's.
        self.optimizer = MixedPrecisionOptimizer(
            model,
            settings.policy
            or FlashAttentionConfig.float32(attention=settings.autocast or torch.float32),
            torch.optim.AdamW,
            params=parameter_groups(trained.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,  # one pass over each tensor, and no temporaries
        )
        groups = self.optimizer.optimizer.param_groups
        self.masters = dict(zip(names, (p for g in groups for p in g["params"]), strict=True))

    def step(self, step: int, batches: Callable[[int], Iterable[Any]]) -> StepRow:
        """One optimizer step, over all of its micro-batches."""
        began = time.perf_counter()
        reset_peak(self.device)
        micro_batches = [tensors(batch) for batch in batches(step)]
        counts = label_counts(micro_batches, step, self.settings.accumulation)
        rate = learning_rate(step, self.settings)
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        # The mean over the step's labels is not the mean of the micro-batches' means: each counts
        # by its labels. One without labels has no mean.
        shares = [count / sum(counts) for count in counts]
        losses = [
            self._backward(batch, share)
            for batch, share in zip(micro_batches, shares, strict=True)
            if share
        ]
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        total_norm = nn.utils.get_total_norm(gradients) / self.optimizer.scale
        loss, norm = float(torch.stack(losses).sum()), float(total_norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        # Gradients that overflowed are what loss scaling reckons with, as long as there is a scale.
        overflow = math.isfinite(loss) and not finite and self.optimizer.scale > 1
        if not finite and not overflow:
            raise self._diverged(step, micro_batches, loss)
        limit = self.settings.max_grad_norm
        if finite and limit is not None:
            nn.utils.clip_grads_with_norm_(self.masters.values(), limit, total_norm)
        taken = self.optimizer.step()
        self.optimizer.zero_grad()  # what follows a step finds the gradients' memory free
        used = zip(micro_batches, shares, strict=True)
        tokens = sum(batch["tokens"].numel() for batch, share in used if share)
        peak = read_peak(self.device)  # waits for a GPU, so that the time is the whole step's
        return StepRow(
            step, loss, norm, rate, time.perf_counter() - began, tokens, peak, skipped=not taken
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "step": len(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(self.device),
            "history": self.history.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History.from_state(state["history"])
        set_random_state(state["random"], self.device)

    def _backward(self, batch: Mapping[str, Tensor], share: float) -> Tensor:
        """Add a micro-batch's part to the gradients; returns its part of the loss."""
        dtype = self.settings.autocast
        on_device = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            loss = self.model(**on_device)
        part = loss.to(torch.promote_types(loss.dtype, torch.float32)) * share
        self.optimizer.backward(part)
        return part.detach()

    def _diverged(
        self, step: int, micro_batches: Sequence[Mapping[str, Tensor]], loss: float
    ) -> TrainingDivergedError:
        """Find the micro-batch by running each alone, from the weights before the step."""
        found, what = None, f"the loss is {loss}, or a gradient is not finite"
        for index, batch in enumerate(micro_batches):
            self.optimizer.zero_grad()
            if not (batch["labels"] != IGNORED).any():
                continue
            alone = float(self._backward(batch, 1.0))
            if not math.isfinite(alone):
                found, what = index, f"the loss is {alone}"
                break
            bad = [
                name
                for name, master in self.masters.items()
                if master.grad is not None and not bool(master.grad.isfinite().all())
            ]
            # If a loss is not finite, this one's scaled gradients may just have overflowed.
            if bad and math.isfinite(loss):
                found, what = index, f"the gradient of {bad[-1]} is not finite"
                what += f" (and {len(bad) - 1} others)" if len(bad) > 1 else ""
                break
        self.optimizer.zero_grad()
        total = len(micro_batches)
        where = (
            f"micro-batch {found} of {total} (from 0)"
            if found is not None
            else f"in none of its {total} micro-batches alone"
        )
        half = self.optimizer.scaler is not None
        message = (
            f"step {step}, {where}: {what}. The step was not taken, the weights are those from "
            f"before it. To find the layer, with PrecisionTracker of labsupport.precision: `with "
            f"PrecisionTracker(model) as tracker: model(**tensors(batches({step})[{found or 0}]))` "
            "(labsupport.training.loop.tensors), then print(tracker.report()). If inputs and "
            "layers are sound: a lower learning_rate, more warmup_steps"
            + (", or bfloat16, which does not overflow" * half)
            + "."
        )
        return TrainingDivergedError(message, step, found, self.history)


def progress_bar(history: History, settings: TrainSettings, *, shown: bool) -> Any:
    """A bar over the steps of a run, from where it stands."""
    from tqdm.auto import tqdm

    return tqdm(
        total=settings.steps,
        initial=min(len(history), settings.steps),
        unit="step",
        disable=not shown,
    )
