"""What the loop accepts, and what it says to the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.precision import FlashAttentionConfig
from labsupport.training.documents.packing import IGNORED


class ResumeError(ValueError):
    """The folder holds a run that would take another course than what was asked for."""


def tensors(batch: Any) -> dict[str, Tensor]:
    """A micro-batch's tensors by name; raises TypeError for what is no micro-batch."""
    if is_dataclass(batch):
        # Beside its tensors it may know numbers of its own, such as how much is padding.
        values = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}
        batch = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if not isinstance(batch, Mapping) or not {"tokens", "labels"} <= batch.keys():
        raise TypeError(
            "a micro-batch is a mapping or a dataclass of tensors, `tokens` and `labels` among "
            f"them, and not {type(batch).__name__}; batches(step) returns a list of them"
        )
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} of a micro-batch is {type(value).__name__}, and must be a tensor: "
                f"torch.as_tensor({name})"
            )
    return dict(batch)


def label_counts(
    micro_batches: Sequence[Mapping[str, Tensor]], step: int, wanted: int
) -> list[int]:
    """How many labels of each micro-batch count; raises ValueError if there are none at all."""
    if len(micro_batches) != wanted:
        raise ValueError(
            f"batches({step}) gave {len(micro_batches)} micro-batches, and the settings say "
            f"accumulation={wanted}"
        )
    counts = [int((batch["labels"] != IGNORED).sum()) for batch in micro_batches]
    if not sum(counts):
        raise ValueError(f"batches({step}) has no label to learn from: all of them are {IGNORED}")
    return counts


def check_weights(model: nn.Module, policy: FlashAttentionConfig | None) -> None:
    """Raise ValueError for a model without weights to train, or in 16 bits without a policy."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires gradients: there is nothing to train")
    for name, parameter in trained if policy is None else ():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {parameter.dtype}: updates smaller than half of its last digit would "
                "be lost. Keep the weights in float32 (model.float()), and compute in bfloat16 by "
                "TrainSettings(autocast=torch.bfloat16); or have float32 masters beside them, by "
                "TrainSettings(policy=FlashAttentionConfig.bfloat16())"
            )


def model_course(model: nn.Module) -> dict[str, Any]:
    """The shape of a model that says it, and how its stream is rounded: a part of the course.

    Other savings change the memory and the last bits; a stream in 16 bits is another model.
    """
    config = getattr(model, "config", None)
    if not is_dataclass(config) or isinstance(config, type):
        return {}
    course = {f"model.{name}": value for name, value in asdict(config).items()}
    residual = getattr(getattr(model, "savings", None), "residual", None)
    return course if residual is None else course | {"model.residual": str(residual)}


def check_plain(course: Mapping[str, Any]) -> None:
    """Raise TypeError for what a checkpoint could hold, but not be opened with again."""
    for name, value in course.items():
        plain = (str, int, float, bool, type(None))
        if type(value) in plain:
            continue
        if isinstance(value, Mapping):
            check_plain({f"{name}.{key}": inner for key, inner in value.items()})
        elif isinstance(value, list | tuple):
            check_plain({f"{name}[{index}]": inner for index, inner in enumerate(value)})
        else:
            raise TypeError(
                f"{name} is {type(value).__name__}: what a run depends on is kept as plain values "
                f"(numbers, strings, None, lists of them); write str({name}) or float({name})"
            )


def check_same_course(
    saved: Mapping[str, Any], asked: Mapping[str, Any], folder: Path | str | None
) -> None:
    """Raise ResumeError, with the list of differences, unless two courses are the same."""
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
        f"{folder} holds a run that took another course: {'; '.join(different)}{hint}. Give it the "
        "same settings, or another folder, or begin anew (fresh=True, --fresh)"
    )


def check_same_shapes(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ResumeError unless a checkpoint's tensors are the model's."""
    different = [
        name
        for name in dict.fromkeys([*saved, *own])
        if name not in saved or name not in own or saved[name].shape != own[name].shape
    ]
    if different:
        raise ResumeError(
            f"the checkpoint is of another model: {len(different)} of its tensors are missing, new "
            f"or of another shape, the first one {different[0]}"
        )
