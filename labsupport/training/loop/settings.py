"""What a training run is told, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import Parameter

from labsupport.precision import FlashAttentionConfig
from labsupport.precision.dtypes import short

# These may change when a run is resumed: they change no weight. `steps` is here because the
# schedule does not follow it, but `decay_steps`, which is among the others.
_FREE = ("steps", "checkpoint_every", "keep")


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    The defaults are those of GPT-3's smallest model, of 125M parameters (Brown et al., Language
    Models are Few-Shot Learners, 2020, table 2.1 and appendix B), apart from its batch size.

    Args:
        steps: optimizer steps of the whole run.
        learning_rate: at its highest.
        warmup_steps: so many steps rise to it in a straight line.
        decay_steps: the step at which the learning rate has come down to `final_fraction` of it,
            along a cosine. Default: `steps`. Give it to be able to add steps to a run later.
        weight_decay: of matrices; biases and the gains of norms do not decay.
        betas: AdamW's.
        max_grad_norm: gradients of a larger total norm are scaled down to it; None: they are not.
        accumulation: micro-batches of each step, one after the other; their gradients add up.
        autocast: the dtype of matrix products (bfloat16, float16); None: that of the weights.
            Weights stay float32, and are rounded anew for each use.
        policy: a dtype for each component, in place of autocast's rules: weights are stored in the
            policy's dtypes, and float32 masters beside them take the updates
            (`labsupport.precision`).
        seed: of the random numbers during training (dropout). Weights are made before.
        checkpoint_every: steps between checkpoints; None: one, at the end.
        keep: so many whole checkpoints are kept, the newest ones.

    Where gradients pass through float16, the loss is scaled, and steps whose gradients overflow are
    left out.

    Raises:
        ValueError: a value is out of its range; both autocast and policy.
    """

    steps: int
    learning_rate: float = 6e-4
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0
    accumulation: int = 1
    autocast: torch.dtype | None = None
    policy: FlashAttentionConfig | None = None
    seed: int = 0
    checkpoint_every: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "keep", "checkpoint_every", "decay_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}, and must be a whole number, at least 1")
        # NumPy's numbers become Python's, lists become tuples: so they compare after a resumption.
        for name in ("learning_rate", "final_fraction", "weight_decay"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}: AdamW takes two, each in 0 ... 1")
        if not 0 <= self.warmup_steps <= self.last_step:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}: it must be between 0 and {self.last_step}, "
                "the steps after which the learning rate is at its lowest"
            )
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, and must be above 0")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction is {self.final_fraction}: a fraction is in 0 ... 1")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"autocast is {self.autocast}: it computes in torch.bfloat16 or torch.float16. "
                "For float32 leave it None"
            )
        if self.autocast is not None and self.policy is not None:
            raise ValueError(
                f"autocast is {self.autocast}, and there is a policy as well: both say in which "
                "dtype each part computes. Give one of them"
            )

    @property
    def last_step(self) -> int:
        """The step from which on the learning rate stays at its lowest."""
        return self.steps if self.decay_steps is None else self.decay_steps

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint follows a step: every so often, and after the last one."""
        done = step + 1
        often = self.checkpoint_every is not None and done % self.checkpoint_every == 0
        return often or done == self.steps

    def course(self) -> dict[str, Any]:
        """What the weights after each step depend on, as plain data: equal in a resumed run."""
        values = {name: value for name, value in asdict(self).items() if name not in _FREE}
        dtype = None if self.autocast is None else short(self.autocast)
        policy = values["policy"] and {part: short(of) for part, of in values["policy"].items()}
        return values | {"decay_steps": self.last_step, "autocast": dtype, "policy": policy}


def parameter_groups(parameters: Iterable[Parameter]) -> list[dict[str, Any]]:
    """For AdamW: matrices decay; biases and norms' gains, which say where zero is, do not."""
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int, settings: TrainSettings) -> float:
    """The learning rate of a step, counted from 0: a straight line up, then half a cosine down.

    It depends on nothing but the step, so there is nothing to save and nothing to get out of step.
    The cosine is that of Loshchilov and Hutter, SGDR (ICLR 2017), section 3, without restarts.

    >>> settings = TrainSettings(steps=110, learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate(step, settings), 3) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    highest, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    lowest = settings.final_fraction * highest
    done = min(1.0, (step - warmup) / max(1, settings.last_step - warmup))
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * done)) / 2
