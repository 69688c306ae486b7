"""Training on several devices, on PyTorch's own engine.

minimal_ring        ring attention in 60 lines, to read first
ring/               attention over a sequence that no single device holds
sequence_parallel   a model whose sequence is sharded over the ranks
data_parallel/      other data on each rank: DDP, FSDP
scaling             what larger worlds and other links would give, predicted
by_hand             one rank's communication, real or rehearsed by threads: exercises 3-6 and 3-7
process_group       which rank this process is, and its device
launch              a function in several processes of this machine
demos               runs of notebook 3
ring_programs       labsupport ring check, bench: is it right on these devices, and how fast?
failures            errors of ranks: which explain themselves

Names are imported from these files when first used, so that the program `labsupport` starts fast.
"""

from typing import Any

import lazy_loader

__getattr__: Any
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "data_parallel": ["train_with_ddp", "train_with_fsdp"],
        "launch": ["LaunchError"],
        "process_group": ["cleanup_ddp", "setup_ddp"],
        "ring": [
            "gather_sequence",
            "positions_of",
            "ring_attention",
            "ring_flash_attn_func",
            "shard_sequence",
            "triton_ring_flash_attn_func",
            "unshard_sequence",
            "zigzag_ring_flash_attn_func",
        ],
        "sequence_parallel": ["shard_model", "train_with_ring"],
    },
)
