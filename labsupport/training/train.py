"""The training loop, top to bottom: batches, the loss, `optimizer.backward(loss)`, a checkpoint.

Step k of a run depends on nothing but the weights, the optimizer's state, and k, from which its
random numbers are seeded: so a run that was killed, and goes on from its last checkpoint, takes the
same steps as one that was not; on a CPU, with the same number of threads, bit for bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.precision import (
    FlashAttentionConfig,
    MixedPrecisionOptimizer,
    apply_precision_policy,
)
from labsupport.training.checkpoint import (
    Checkpoints,
    ResumeError,
    check_same_run_config,
    model_run_config,
)
from labsupport.training.config import TrainConfig
from labsupport.training.data import IGNORED, tensors
from labsupport.training.history import History, StepRow, read_peak, reset_peak


class TrainingDivergedError(RuntimeError):
    """A loss or a gradient is NaN or infinite. The step was not taken: the weights are good.

    Attributes:
        step: counted from 0.
        micro_batch: the first with such a loss; None if it is a gradient of one of several.
        history: of the steps before: its curves often show where the trouble began.
    """

    def __init__(self, message: str, step: int, micro_batch: int | None, history: History) -> None:
        super().__init__(message)
        self.step, self.micro_batch, self.history = step, micro_batch, history


def train(
    model: nn.Module,
    batches: Callable[[int], Iterable[Any]],
    settings: TrainConfig,
    *,
    validation: Iterable[Any] = (),
    sample: Callable[[nn.Module], str] | None = None,
    folder: Path | str | None = None,
    fresh: bool = False,
    run_config: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    stop: Callable[[], bool] | None = None,
    progress: bool = True,
) -> History:
    """Train a model with AdamW; with a folder, resume the run in it.

    Args:
        model: on its device, with float32 weights; `settings.policy` is applied to it, and stays.
            `model(**batch)` returns the mean loss over the labels that are not -100, a scalar.
        batches: step (counted from 0) -> a step's micro-batches, always the same: dataclasses or
            mappings of tensors, `tokens` and `labels` (any shape, int64) among them, on any device.
        settings: how to train, and in which dtypes.
        validation: micro-batches for a validation loss before each checkpoint.
        sample: lets the model write a text, before each checkpoint; without global random numbers.
        folder: for checkpoints. If a run is in it, that run goes on; if that run is complete,
            nothing is done.
        fresh: delete the checkpoints in the folder and start again.
        run_config: what else the weights depend on, by name, as plain values (which texts, say); it
            is saved, and must be equal when the run is resumed, as must the settings and the
            model's `config`, if that is a dataclass.
        on_step: called with each step's row, before its checkpoint.
        stop: called after each step; if it returns True, save a checkpoint and return.
        progress: show a bar, on stderr.

    Returns:
        The history of the whole run, with the steps before a resumption.

    PyTorch's random numbers are seeded in each step.

    Raises:
        TrainingDivergedError: NaN or infinity, before the step's update. With float16, gradients
            that overflow are expected: such a step is skipped and the loss scaled down, and this is
            raised once there is nothing left to scale.
        ResumeError: the folder's run had other settings, or another model; names the differences.
        CheckpointError: the newest checkpoint cannot be read, or another program trains there.
        ValueError: weights that are not float32 (or float64) and under no policy, none that needs
            gradients, a step without labels or with another number of micro-batches.
        TypeError: a batch that is neither a dataclass nor a mapping of tensors with tokens and
            labels; a value of `run_config` that is not plain.

    >>> stream = batches([list(range(200))], 64, end_token=256)
    >>> settings = TrainConfig(steps=2, checkpoint_every=1)
    >>> history = train(Decoder(DecoderConfig.preset("tiny")), stream, settings, progress=False)
    >>> len(history.losses)
    2
    """
    check_weights(model, settings.policy)
    everything = settings.run_config() | model_run_config(model) | dict(run_config or {})
    everything = json.loads(json.dumps(everything))  # plain data, as a checkpoint holds it
    device = next(p.device for p in model.parameters() if p.requires_grad)
    checkpoints = None if folder is None else Checkpoints(folder, keep=settings.keep)
    with nullcontext() if checkpoints is None else checkpoints.in_use(fresh=fresh):
        saved = None if checkpoints is None else checkpoints.load_newest()
        if saved is not None:
            check_same_run_config(saved["run_config"], everything, folder)
        # Without a policy all weights are float32 and their own masters.
        if settings.policy is not None:
            apply_precision_policy(model, settings.policy)
        optimizer = MixedPrecisionOptimizer(
            model,
            settings.policy
            or FlashAttentionConfig.float32(attention=settings.autocast or torch.float32),
            torch.optim.AdamW,
            groups=parameter_groups(model.parameters()),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,  # one pass over each tensor, and no temporaries
        )
        masters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        history = History()
        if saved is not None:
            try:
                model.load_state_dict(saved["model"])
            except RuntimeError as error:
                raise ResumeError(f"{folder} holds a run of another model: {error}") from None
            optimizer.load_state_dict(saved["optimizer"])
            history = History.from_state(saved["history"])
            del saved
        model.train()
        bar = progress_bar(history, settings, shown=progress)
        for step in range(len(history), settings.steps):
            began = time.perf_counter()
            reset_peak(device)
            torch.manual_seed(settings.seed + step * 2**16)
            micro_batches = [tensors(batch) for batch in batches(step)]
            if len(micro_batches) != settings.gradient_accumulation_steps:
                raise ValueError(
                    f"batches({step}) gave {len(micro_batches)} micro-batches, but the settings "
                    f"say gradient_accumulation_steps={settings.gradient_accumulation_steps}"
                )
            # The mean over the step's labels is not the mean of the micro-batches' means: each
            # counts by its labels. One without labels has no mean.
            counts = [int((batch["labels"] != IGNORED).sum()) for batch in micro_batches]
            if not sum(counts):
                raise ValueError(f"batches({step}) has no label: all of them are {IGNORED}")
            optimizer.zero_grad()
            losses, tokens = [], 0
            for batch, count in zip(micro_batches, counts, strict=True):
                part = torch.zeros((), device=device)
                if count:
                    tokens += batch["tokens"].numel()
                    part = _loss(model, batch, settings, device) * (count / sum(counts))
                    optimizer.backward(part)
                losses.append(part.detach())
            gradients = [m.grad for m in masters if m.grad is not None]
            total_norm = nn.utils.get_total_norm(gradients) / optimizer.scale
            loss, norm = float(torch.stack(losses).sum()), float(total_norm)
            # Overflowing gradients are normal under loss scaling: the optimizer skips the step.
            overflow = math.isfinite(loss) and not math.isfinite(norm) and optimizer.scale > 1
            if not math.isfinite(loss + norm) and not overflow:
                optimizer.zero_grad()
                raise _diverged(step, losses, norm, optimizer.scaler is not None, history)
            if not overflow and settings.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(masters, settings.max_grad_norm, total_norm)
            rate = learning_rate(step, settings)
            for group in optimizer.optimizer.param_groups:
                group["lr"] = rate
            taken = optimizer.step()
            optimizer.zero_grad()  # evaluation and checkpoint find the gradients' memory free
            peak = read_peak(device)  # waits for a GPU, so that the time is the whole step's
            seconds = time.perf_counter() - began
            row = StepRow(step, loss, norm, rate, seconds, tokens, peak, skipped=not taken)
            if settings.saves_after(step):
                row = _evaluated(row, model, settings, device, validation, sample)
            history.rows.append(row)
            bar.set_postfix_str(f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tokens/s")
            bar.update()
            if on_step is not None:
                on_step(row)
            stopping = stop is not None and stop()
            if checkpoints is not None and (stopping or settings.saves_after(step)):
                state: dict[str, Any] = {"step": step + 1, "run_config": everything}
                state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state["history"] = history.state()
                checkpoints.save(step + 1, state)
            if stopping:
                break
        bar.close()
    return history


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Return the learning rate of a step, counted from 0: a line up, then half a cosine down.

    It depends on nothing but the step, so there is nothing to save and nothing to get out of step.
    The cosine is that of Loshchilov and Hutter, SGDR (ICLR 2017), section 3, without restarts.

    >>> settings = TrainConfig(steps=110, learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate(step, settings), 3) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    highest, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    lowest = settings.final_fraction * highest
    done = min(1.0, (step - warmup) / max(1, settings.last_step - warmup))
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * done)) / 2


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Group for AdamW: matrices decay; biases and norms' gains, which say where zero is, do not."""
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def check_weights(model: nn.Module, policy: FlashAttentionConfig | None) -> None:
    """Raise ValueError for a model without weights to train, or in 16 bits without a policy."""
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model requires gradients: there is nothing to train")
    for name, dtype in trained.items() if policy is None else ():
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {dtype}: updates smaller than half of its last digit would be lost. "
                "Keep the weights in float32 (model.float()), and compute in bfloat16 with "
                "TrainConfig(autocast=torch.bfloat16); or add float32 masters with "
                "TrainConfig(policy=FlashAttentionConfig.bfloat16())"
            )


def write_text(model: nn.Module, prompt: Tensor, count: int, *, context: int) -> Tensor:
    """Let a decoder continue a prompt, drawing each token by its probability, the same each time.

    `prompt` is (1, seqlen) int64; the model sees at most `context` tokens at a time. Returns the
    prompt and its continuation, (1, seqlen + count).
    """
    generator, tokens = torch.Generator().manual_seed(0), prompt
    with torch.no_grad():
        for _ in range(count):
            probabilities = model(tokens[:, -context:])[:, -1].float().softmax(-1).cpu()
            token = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, token.to(tokens.device)], dim=1)
    return tokens


def progress_bar(history: History, settings: TrainConfig, *, shown: bool) -> Any:
    """Return a bar over the steps of a run, from where it stands."""
    from tqdm.auto import tqdm

    done = min(len(history), settings.steps)
    return tqdm(total=settings.steps, initial=done, unit="step", disable=not shown)


def _loss(
    model: nn.Module, batch: Mapping[str, Tensor], settings: TrainConfig, device: torch.device
) -> Tensor:
    """Return a micro-batch's mean loss, at least in float32."""
    dtype = settings.autocast
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


@torch.no_grad()
def _evaluated(
    row: StepRow,
    model: nn.Module,
    settings: TrainConfig,
    device: torch.device,
    validation: Iterable[Any],
    sample: Callable[[nn.Module], str] | None,
) -> StepRow:
    """Add the validation loss, over all labels, and a sample of text."""
    model.eval()
    text, loss, dtype = None, None, settings.autocast
    if sample is not None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            text = sample(model)
    parts = [
        (float(_loss(model, batch, settings, device)), count)
        for batch in map(tensors, validation)
        if (count := int((batch["labels"] != IGNORED).sum()))
    ]
    if parts:
        loss = sum(mean * count for mean, count in parts) / sum(count for _, count in parts)
    model.train()
    return replace(row, validation_loss=loss, sample=text)


def _diverged(
    step: int, losses: list[Tensor], norm: float, float16: bool, history: History
) -> TrainingDivergedError:
    """Name the step and the micro-batch, and the way to the layer."""
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    what = f"the gradients' norm is {norm}" if bad is None else f"the loss is {float(losses[bad])}"
    if len(losses) == 1:
        bad = 0
    place = "a micro-batch" if bad is None else f"micro-batch {bad}"
    bfloat16 = ", or bfloat16, which does not overflow" if float16 else ""
    return TrainingDivergedError(
        f"step {step}, {place} of {len(losses)} (from 0): {what}. The step was not taken. To find "
        "the layer, call the model on this batch inside `with PrecisionTracker(model) as tracker:` "
        "(labsupport.precision), then print(tracker.report()). If inputs and layers are "
        f"sound: a lower learning_rate, more warmup_steps{bfloat16}.",
        step,
        bad,
        history,
    )
