"""Training on several devices, on PyTorch's own engine.

minimal_ring        ring attention in 60 lines, to read first
ring/               attention over a sequence that no single device holds
sequence_parallel   a model whose sequence is sharded over the ranks
data_parallel/      other data on each rank: DDP, FSDP, distributed checkpoints
scaling             what larger worlds and other links would give, predicted
by_hand             one rank's communication, real or rehearsed by threads: exercises 3-6 and 3-7
process_group       which rank this process is, and its device
launch              a function in several processes of this machine
demos               runs of notebook 3
ring_programs       labsupport ring check, bench: is it right on these devices, and how fast?
failures            errors of ranks: which explain themselves

Names are imported from these files when first used, so that the program `labsupport` starts fast.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "LaunchError": "launch",
    "cleanup_ddp": "process_group",
    "gather_sequence": "ring",
    "positions_of": "ring",
    "ring_attention": "ring",
    "ring_flash_attn_func": "ring",
    "setup_ddp": "process_group",
    "shard_model": "sequence_parallel",
    "shard_sequence": "ring",
    "train_with_ddp": "data_parallel",
    "train_with_fsdp": "data_parallel",
    "train_with_ring": "sequence_parallel",
    "triton_ring_flash_attn_func": "ring",
    "unshard_sequence": "ring",
    "zigzag_ring_flash_attn_func": "ring",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
