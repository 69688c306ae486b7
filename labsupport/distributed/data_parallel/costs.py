"""Costs of data parallelism: bytes that a rank sends in a step, and bytes that it stores.

An all-gather or a reduce-scatter of n bytes over W ranks sends (W-1)/W · n, an all-reduce twice
that. DDP all-reduces the gradients; FSDP all-gathers the parameters twice and reduce-scatters the
gradients (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def ddp_bytes_sent(gradient_bytes: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a step under DDP, by ring all-reduce.

    >>> ddp_bytes_sent(4_000_000, ranks=4)
    6000000.0
    """
    return 2 * (ranks - 1) / ranks * gradient_bytes


def fsdp_bytes_sent(
    parameter_bytes: int,
    gradient_bytes: int,
    ranks: int,
    *,
    micro_batches: int = 1,
    sync_every: bool = False,
    kept_bytes: int = 0,
) -> float:
    """Return the bytes that each rank sends in a step under FSDP.

    Args:
        parameter_bytes, gradient_bytes: of the whole model, in the dtypes in which they travel.
        ranks: how many share the model.
        micro_batches: of each rank; each of them gathers the parameters again.
        sync_every: whether gradients are reduced after each, and not after the last only.
        kept_bytes: of those parameters that are kept from forward to backward, as the root's are
            (those outside of the blocks): gathered once a micro-batch, not twice.

    >>> fsdp_bytes_sent(4_000_000, 4_000_000, ranks=4)
    9000000.0
    """
    gathered = micro_batches * (2 * parameter_bytes - kept_bytes)
    reduced = (micro_batches if sync_every else 1) * gradient_bytes
    return (ranks - 1) / ranks * (gathered + reduced)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank stores between steps, without activations."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer


def predict_state_bytes(parameters: int, *, ranks: int = 1, stage: int = 3) -> StateBytes:
    """Predict a rank's bytes for float32 parameters under AdamW, sharded over `ranks`.

    `stage` is ZeRO's: 1 shares AdamW's states, 2 the gradients, too, 3 all. Stage 0 is DDP: 16
    bytes a parameter. Stage 3 is FSDP, up to rounding: it cuts each tensor along its rows, and rows
    may not divide by the number of ranks.

    >>> predict_state_bytes(1_000_000_000, ranks=8, stage=1).total / 1e9
    9.0
    """
    whole, share = 4 * parameters, 4 * parameters // ranks
    return StateBytes(
        parameters=share if stage >= 3 else whole,
        gradients=share if stage >= 2 else whole,
        optimizer=2 * (share if stage >= 1 else whole),
    )


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Measure the bytes that this rank stores: its part of sharded tensors, tied weights once."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = parameters, [p.grad for p in parameters], states

    def nbytes(value: Any) -> int:
        return getattr(value.to_local() if isinstance(value, DTensor) else value, "nbytes", 0)

    return StateBytes(*(sum(map(nbytes, values)) for values in held))
