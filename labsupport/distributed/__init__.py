"""Training on several devices, on PyTorch's own engine.

ring/               attention over a sequence that no single device holds
ring_tools/         labsupport ring: is it right on these devices, and how fast
sequence_parallel/  a model whose sequence is sharded over the ranks
data_parallel/      other data on each rank: DDP, FSDP, distributed checkpoints
scaling/            what larger worlds and other links would give, predicted
launch/             a function or a script in several processes of this machine
failures            what is said of a rank that failed

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.distributed.data_parallel.ddp import train_with_ddp as train_with_ddp
    from labsupport.distributed.data_parallel.fsdp import train_with_fsdp as train_with_fsdp
    from labsupport.distributed.data_parallel.process_group import cleanup_ddp as cleanup_ddp
    from labsupport.distributed.data_parallel.process_group import setup_ddp as setup_ddp
    from labsupport.distributed.launch.errors import LaunchError as LaunchError
    from labsupport.distributed.ring.functions import ring_flash_attn_func as ring_flash_attn_func
    from labsupport.distributed.ring.functions import (
        triton_ring_flash_attn_func as triton_ring_flash_attn_func,
    )
    from labsupport.distributed.ring.functions import (
        zigzag_ring_flash_attn_func as zigzag_ring_flash_attn_func,
    )
    from labsupport.distributed.ring.zigzag import gather_sequence as gather_sequence
    from labsupport.distributed.ring.zigzag import positions_of as positions_of
    from labsupport.distributed.ring.zigzag import shard_sequence as shard_sequence
    from labsupport.distributed.ring.zigzag import unshard_sequence as unshard_sequence
    from labsupport.distributed.sequence_parallel.model import shard_model as shard_model
    from labsupport.distributed.sequence_parallel.run import train_with_ring as train_with_ring

_HOME = {
    "LaunchError": "launch.errors",
    "cleanup_ddp": "data_parallel.process_group",
    "gather_sequence": "ring.zigzag",
    "positions_of": "ring.zigzag",
    "ring_flash_attn_func": "ring.functions",
    "setup_ddp": "data_parallel.process_group",
    "shard_model": "sequence_parallel.model",
    "shard_sequence": "ring.zigzag",
    "train_with_ddp": "data_parallel.ddp",
    "train_with_fsdp": "data_parallel.fsdp",
    "train_with_ring": "sequence_parallel.run",
    "triton_ring_flash_attn_func": "ring.functions",
    "unshard_sequence": "ring.zigzag",
    "zigzag_ring_flash_attn_func": "ring.functions",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
