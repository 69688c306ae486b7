"""The training loop, for any number of ranks: batches, the loss, `loss.backward()`, a checkpoint.

Step k of a run depends on nothing but the weights, the optimizer's state, and k, from which its
random numbers are seeded (and from the rank). So a run that was killed, and goes on from its last
checkpoint, takes the same steps as one that was not: on one device, and with the same number of
threads, bit for bit; with another number of ranks within rounding.

SEVERAL RANKS. A step's loss is the mean over ALL N labels of all ranks' micro-batches. DDP and FSDP
*average* gradients over the W ranks, so the mean loss of a micro-batch with n labels is weighted by
W n / N (theory chapter 11, uneven ranks). A collective needs every rank: so the ranks first tell
one another what they have, and a rank with fewer micro-batches computes empty ones of weight 0.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from labsupport.precision import (
    FlashAttentionConfig,
    MixedPrecisionOptimizer,
    apply_precision_policy,
)
from labsupport.training.checkpoint import (
    Checkpoints,
    check_same_run_config,
    check_same_tensors,
    gather,
    model_run_config,
)
from labsupport.training.config import TrainConfig
from labsupport.training.data import IGNORED, tensors
from labsupport.training.history import History, StepRow, read_peak, reset_peak

Batches = Callable[[int], Iterable[Any]]


class TrainingDivergedError(RuntimeError):
    """A loss or a gradient is NaN or infinite. The step was not taken: the weights are good.

    Attributes:
        step: counted from 0.
        micro_batch: the first of this rank with such a loss; None if there is none, but a gradient.
        history: of the steps before: its curves often show where the trouble began.
    """

    def __init__(self, message: str, step: int, micro_batch: int | None, history: History) -> None:
        super().__init__(message)
        self.step, self.micro_batch, self.history = step, micro_batch, history


def train(
    model: nn.Module,
    batches: Batches,
    settings: TrainConfig,
    *,
    folder: Path | str | None = None,
    run_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> History:
    """Train a model with AdamW on one device; with a folder, resume the run in it.

    Args:
        model: on its device, with float32 weights; `settings.policy` is applied to it, and stays.
            `model(**batch)` returns the mean loss over the labels that are not -100, a scalar.
        batches: step (counted from 0) -> a step's micro-batches, always the same: dataclasses or
            mappings of tensors, `tokens` and `labels` (any shape, int64) among them, on any device.
        settings: how to train, and in which dtypes.
        folder, run_config: as for `Trainer`.
        options: validation, sample, on_step, stop and progress, as for `Trainer.run`.

    Returns:
        The history of the whole run, with the steps before a resumption.

    PyTorch's random numbers are seeded in each step.

    Raises:
        as `Trainer` and `Trainer.run`.

    >>> stream = batches([list(range(200))], 64, end_token=256)
    >>> settings = TrainConfig(steps=2, checkpoint_every=1)
    >>> history = train(Decoder(DecoderConfig.preset("tiny")), stream, settings, progress=False)
    >>> len(history.losses)
    2
    """
    trainer = Trainer(model, settings, folder=folder, run_config=run_config)
    history = trainer.run(batches, **options)
    trainer.optimizer.zero_grad()
    return history


@dataclass(frozen=True)
class Share:
    """One rank's micro-batches of a step.

    parts: index, tensors, and weight n / N; those without labels are left out, and empty ones of
        weight 0 filled in. most: of micro-batches given to a rank. labels, tokens: of all ranks.
    """

    parts: list[tuple[int, dict[str, Tensor], float]]
    most: int
    labels: int
    tokens: int


def _check_same_on_all_ranks(group: Any, settings: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError, on all ranks, for what would let their weights go apart."""
    trained = [(n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad]
    own = settings | {"trainable weights": trained}
    given: list[Any] = [None] * group.size()
    dist.all_gather_object(given, own, group=group)
    for rank, other in enumerate(given):
        if names := [name for name in own if other.get(name) != given[0].get(name)]:
            first, there = (str(each.get(names[0]))[:80] for each in (given[0], other))
            raise ValueError(
                f"all ranks train alike, but ranks 0 and {rank} differ in {', '.join(names)} "
                f"({names[0]}: {first} and {there}): give them the same"
            )


class Trainer:
    """A model and its optimizer, alone or as one of several ranks.

    Args:
        model: as for `train`; or wrapped in DistributedDataParallel, or sharded by `fully_shard`.
            The gradients of any other model in a group are averaged after the backward passes, and
            its weights become rank 0's.
        settings: how to train, and in which dtypes.
        folder: for checkpoints. If a run is in it, that run goes on; if that run is complete,
            nothing is done.
        run_config: what else the weights depend on, by name, as plain values (which texts, say); it
            is saved, and must be equal when the run is resumed, as must the settings and the
            model's `config`, if that is a dataclass.
        group: the ranks that share each step; None: this process alone.
        device: to compute on; None: that of the weights.
        sync_every: average gradients after each micro-batch, as without no_sync(), to see what that
            costs.
        one_sequence: the ranks' micro-batches are shards of the same sequences: all ranks compute
            all of them, with labels or without.

    Attributes:
        model: without DDP's wrapper.
        optimizer: a `MixedPrecisionOptimizer`.
        history: of the whole run, with the steps before a resumption.

    Raises:
        ResumeError: the folder's run had other settings, or another model; names the differences.
        CheckpointError: the newest checkpoint cannot be read.
        ValueError: ranks with other settings or trainable weights; weights that are not float32
            (or float64) and under no policy, none that needs gradients; a policy for a model in
            DDP or FSDP.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainConfig,
        *,
        folder: Path | str | None = None,
        run_config: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sync_every: bool = False,
        one_sequence: bool = False,
    ) -> None:
        self.called = model
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.settings, self.group = settings, group
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())
        self.sync_every, self.one_sequence = sync_every, one_sequence
        self.history = History()
        check_weights(self.model, settings.policy)
        self.device = device or next(p.device for p in model.parameters() if p.requires_grad)
        config = settings.run_config() | model_run_config(self.model) | dict(run_config or {})
        # Eight micro-batches of one rank are four of each of two: not compared.
        del config["gradient_accumulation_steps"]
        self.run_config = json.loads(json.dumps(config))  # plain data, as a checkpoint holds it
        self.checkpoints = None
        if folder is not None:
            self.checkpoints = Checkpoints(folder, keep=settings.keep, group=group)
            if (saved := self.checkpoints.run()) is not None:
                check_same_run_config(saved["run_config"], self.run_config, folder)
        self.averages = isinstance(model, DistributedDataParallel | FSDPModule)
        if group is not None:
            own = self.run_config | {"steps": settings.steps}
            _check_same_on_all_ranks(group, own, self.model)
        if group is not None and not self.averages:
            for tensor in self.model.state_dict().values():
                dense = tensor.contiguous()  # of another one gloo writes between its entries
                dist.broadcast(dense, group=group, group_src=0)
                tensor.copy_(dense)
        if settings.policy is not None:
            if self.averages:
                raise ValueError(
                    "a precision policy keeps float32 masters beside the weights, and DDP and FSDP "
                    "would add up gradients in 16 bits: use TrainConfig(autocast=torch.bfloat16), "
                    "or FSDP's mixed_precision"
                )
            apply_precision_policy(self.model, settings.policy)
        # Without a policy all weights are float32 and their own masters.
        self.optimizer = MixedPrecisionOptimizer(
            self.model,
            settings.policy
            or FlashAttentionConfig.float32(attention=settings.autocast or torch.float32),
            torch.optim.AdamW,
            groups=parameter_groups(self.model.parameters()),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,  # one pass over each tensor, and no temporaries
        )

    def run(
        self,
        batches: Batches,
        *,
        validation: Iterable[Any] = (),
        sample: Callable[[nn.Module], str] | None = None,
        on_step: Callable[[StepRow], None] | None = None,
        stop: Callable[[], bool] | None = None,
        progress: bool = True,
    ) -> History:
        """Take all steps, from the end of the folder's run on; every rank calls this.

        Args:
            batches: step -> THIS rank's micro-batches, at most
                `settings.gradient_accumulation_steps`; as for `train`.
            validation: this rank's micro-batches for a validation loss before each checkpoint.
            sample: lets the model write a text, before each checkpoint, on all ranks; without
                global random numbers.
            on_step: called with each step's row, before its checkpoint.
            stop: called after each step; if it returns True on one rank, all save a checkpoint and
                return.
            progress: show a bar, on stderr of rank 0.

        Raises:
            TrainingDivergedError: NaN or infinity, before the step's update. With float16,
                gradients that overflow are expected: such a step is skipped and the loss scaled
                down, and this is raised once there is nothing left to scale.
            ValueError: a step without labels, or with too many micro-batches; on all ranks.
            TypeError: a batch that is neither a dataclass nor a mapping of tensors with tokens and
                integer labels; a model's loss that is no scalar with gradients; a value of
                `run_config` that is not plain.
            CheckpointError: a checkpoint cannot be read or written, or another program trains here.
            ResumeError: the folder's run is of another model.
        """
        settings = self.settings
        with nullcontext() if self.checkpoints is None else self.checkpoints.in_use():
            self._load()
            self.model.train()
            with progress_bar(self.history, settings, shown=progress and self.rank == 0) as bar:
                for number in range(len(self.history), settings.steps):
                    row = self.step(number, batches(number))
                    if settings.saves_after(number):
                        row = replace(
                            row,
                            sample=self._write(sample),
                            validation_loss=self.evaluate(validation),
                        )
                    self.history.rows.append(row)
                    bar.set_postfix_str(f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tokens/s")
                    bar.update()
                    if on_step is not None:
                        on_step(row)
                    # A signal reaches the ranks at different times: all stop if one of them has it.
                    stopping = stop is not None and any(gather(stop(), self.group))
                    if stopping or settings.saves_after(number):
                        self._save(number + 1)
                    if stopping:
                        break
        return self.history

    def step(self, number: int, micro_batches: Iterable[Any]) -> StepRow:
        """Take one optimizer step; its gradients stay until the next one.

        Args:
            number: of the step, from 0.
            micro_batches: of this rank.

        Raises: as `run`.
        """
        began, settings, optimizer = time.perf_counter(), self.settings, self.optimizer
        # DDP's gradients are views of its buckets: without them, no_sync() would hold others.
        optimizer.zero_grad(set_to_none=not isinstance(self.called, DistributedDataParallel))
        reset_peak(self.device)
        torch.manual_seed(settings.seed + number * 2**16 + self.rank)
        share = self._share(micro_batches)
        if share.most > settings.gradient_accumulation_steps:
            raise ValueError(
                f"batches({number}) gave a rank {share.most} micro-batches, but the settings say "
                f"gradient_accumulation_steps={settings.gradient_accumulation_steps}"
            )
        if not share.labels:
            raise ValueError(f"batches({number}) has no label to learn from: all are {IGNORED}")

        losses = []
        for place, (_, batch, weight) in enumerate(share.parts):
            with self._communicating(last=place == len(share.parts) - 1):
                loss = self._loss(self.called, batch) * weight
                losses.append(loss.detach())
                loss = optimizer.scale_loss(loss * self.world)  # by 1, unless float16 needs more
                loss.backward()
            optimizer.collect_gradients()
        if self.group is not None and not self.averages:
            self._average_gradients()

        limit = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
        norm = float(optimizer.clip_grad_norm_(limit))
        loss = float(self._sum(torch.stack(losses).sum()))
        # Overflowing gradients are normal under loss scaling: the optimizer skips the step.
        overflow = math.isfinite(loss) and not math.isfinite(norm) and optimizer.scale > 1
        if not math.isfinite(loss + norm) and not overflow:
            optimizer.zero_grad()
            raise self._diverged(number, share, losses, loss, norm)
        rate = learning_rate(number, settings)
        for group in optimizer.optimizer.param_groups:
            group["lr"] = rate
        taken = optimizer.step()
        peak = read_peak(self.device)  # waits for a GPU, so that the time is the whole step's
        seconds = time.perf_counter() - began
        return StepRow(number, loss, norm, rate, seconds, share.tokens, peak, skipped=not taken)

    def evaluate(self, micro_batches: Iterable[Any]) -> float | None:
        """Return the mean loss over all labels of all ranks' micro-batches; None without labels."""
        share = self._share(micro_batches)
        if not share.labels:
            return None
        with self._evaluating():
            parts = [self._loss(self.model, batch) * weight for _, batch, weight in share.parts]
        return float(self._sum(torch.stack(parts).sum()))

    # --- parts of a step --------------------------------------------------------------------------

    def _share(self, micro_batches: Iterable[Any]) -> Share:
        """Weight this rank's micro-batches by their labels, and agree about N with the others."""
        given = list(micro_batches)
        own = [tensors(batch) for batch in given]
        counts = [int((batch["labels"] != IGNORED).sum()) for batch in own]
        # The mean over no labels may be NaN, and 0 times NaN is NaN: not computed.
        kept = [i for i, count in enumerate(counts) if count or self.one_sequence]
        tokens = sum(own[i]["tokens"].numel() - getattr(given[i], "fillers", 0) for i in kept)
        by_rank = gather((len(own), len(kept), sum(counts), tokens), self.group)
        numbers, computed, labels, all_tokens = zip(*by_rank, strict=True)
        parts = [
            (
                i,
                {name: tensor.to(self.device) for name, tensor in own[i].items()},
                counts[i] / max(sum(labels), 1),
            )
            for i in kept
        ]
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        empty = (len(own), {"tokens": one, "labels": one}, 0.0)
        parts += [empty] * (max(computed) - len(parts))
        return Share(parts, max(numbers), sum(labels), sum(all_tokens))

    def _communicating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Let the gradients of a micro-batch travel, or only add up here (before the last one)."""
        travel = last or self.sync_every
        if isinstance(self.called, FSDPModule):
            self.called.set_requires_gradient_sync(travel)
        if isinstance(self.called, DistributedDataParallel) and not travel:
            return self.called.no_sync()
        return nullcontext()

    def _loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a micro-batch's mean loss, at least in float32."""
        with self._autocast():
            loss = model(**batch)
        sound = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point()
        if not sound or torch.is_grad_enabled() > loss.requires_grad:
            raise TypeError(
                "model(**batch) must return the mean loss, a scalar that depends on the weights, "
                f"and not {loss!r:.60}"
            )
        return loss.to(torch.promote_types(loss.dtype, torch.float32))

    def _autocast(self) -> torch.autocast:
        dtype = self.settings.autocast
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _average_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.world
        self.optimizer.collect_gradients()

    def _sum(self, own: Tensor) -> Tensor:
        """Add up a number over the ranks."""
        if self.group is not None:
            dist.all_reduce(own, group=self.group)
        return own

    def _write(self, sample: Callable[[nn.Module], str] | None) -> str | None:
        if sample is None:
            return None
        with self._evaluating(), self._autocast():
            return sample(self.model)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Let the model compute without dropout and gradients."""
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a backward pass would have, and a checkpoint needs it

    def _diverged(
        self, step: int, share: Share, losses: list[Tensor], loss: float, norm: float
    ) -> TrainingDivergedError:
        """Name the step and the micro-batch, and the way to the layer."""
        parts = zip(share.parts, losses, strict=True)
        bad = next((i for (i, _, _), own in parts if not math.isfinite(own)), None)
        finite = math.isfinite(loss)
        what = f"the gradients' norm is {norm}" if finite else f"the loss is {loss}"
        if share.most == 1 and self.world == 1:
            bad = 0
        place = "a micro-batch" if bad is None else f"micro-batch {bad}"
        bfloat16 = ""
        if self.optimizer.scaler is not None:
            bfloat16 = ", or bfloat16, which does not overflow"
        return TrainingDivergedError(
            f"step {step}, {place} of {share.most} (from 0): {what}. The step was not taken. To "
            "find the layer, call the model on this batch inside `with PrecisionTracker(model) as "
            "tracker:` (labsupport.precision), then print(tracker.report()). If inputs and layers "
            f"are sound: a lower learning_rate, more warmup_steps{bfloat16}.",
            step,
            bad,
            self.history,
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors that a step depends on, by name; tied weights once."""
        parameters = dict(self.model.named_parameters())
        every = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = {n: x for n, x in self.model.state_dict().items() if n not in every}
        state = {f"model/{name}": x.detach() for name, x in (parameters | buffers).items()}
        for name, master in self.optimizer.masters.items():
            if master is not parameters[name]:
                state[f"master/{name}"] = master.detach()
            averages = self.optimizer.optimizer.state.get(master, {})
            state |= {f"{what}/{name}": value for what, value in averages.items()}
        return state

    def _save(self, steps: int) -> None:
        if self.checkpoints is None:
            return
        scaler = self.optimizer.scaler
        run = {
            "ranks": self.world,
            "run_config": self.run_config,
            "scaler": None if scaler is None else scaler.state_dict(),
            "history": self.history.state(),
        }
        self.checkpoints.save(steps, self._state(), run)

    def _load(self) -> None:
        """Fill the model and the optimizer from the newest checkpoint, each rank its part."""
        if self.checkpoints is None or (run := self.checkpoints.run()) is None:
            return
        saved = self.checkpoints.names()
        # AdamW makes its averages in its first step, and a checkpoint is read into them. A rate of
        # 0 changes no weight.
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = 0.0
        for name, master in self.optimizer.masters.items():
            if f"exp_avg/{name}" in saved:
                master.grad = torch.zeros_like(master)
        self.optimizer.optimizer.step()
        self.optimizer.zero_grad()
        state = self._state()
        check_same_tensors(saved, state, self.checkpoints.folder)
        self.checkpoints.load(state)
        if self.optimizer.scaler is not None:
            self.optimizer.scaler.load_state_dict(run["scaler"])
        self.history = History.from_state(run["history"])


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Return the learning rate of a step, counted from 0: a line up, then half a cosine down.

    It depends on nothing but the step, so there is nothing to save and nothing to get out of step.
    The cosine is that of Loshchilov and Hutter, SGDR (ICLR 2017), section 3, without restarts.

    Raises:
        ValueError: a step below 0.

    >>> settings = TrainConfig(steps=110, learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate(step, settings), 3) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < 0:
        raise ValueError(f"steps count from 0, and {step} was given")
    highest, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    lowest = settings.final_fraction * highest
    done = min(1.0, (step - warmup) / max(1, settings.last_step - warmup))
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * done)) / 2


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters for AdamW: biases and norm weights are not decayed."""
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
    prompt and its continuation, (1, seqlen + count), or less if the model's numbers are not finite.

    Raises:
        ValueError: a prompt of another shape, or without a token; count below 0, context below 1.
    """
    if prompt.ndim != 2 or len(prompt) != 1 or not prompt.numel() or count < 0 or context < 1:
        raise ValueError(
            f"prompt {tuple(prompt.shape)}, count {count}, context {context}: they must be "
            "(1, seqlen) with a token, 0 or more, 1 or more"
        )
    generator, tokens = torch.Generator().manual_seed(0), prompt
    with torch.no_grad():
        for _ in range(count):
            probabilities = model(tokens[:, -context:])[:, -1].float().softmax(-1).cpu()
            if not probabilities.isfinite().all():
                break
            token = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, token.to(tokens.device)], dim=1)
    return tokens


def progress_bar(history: History, settings: TrainConfig, *, shown: bool) -> Any:
    """Return a bar over the steps of a run, from where it stands."""
    from tqdm.auto import tqdm

    done = min(len(history), settings.steps)
    return tqdm(total=settings.steps, initial=done, unit="step", disable=not shown, leave=False)
