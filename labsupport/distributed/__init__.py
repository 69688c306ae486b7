"""Training on several devices, on PyTorch's own engine.

minimal_ring        ring attention in 60 lines, to read first
ring/               attention over a sequence that no single device holds
sequence_parallel   a model whose sequence is sharded over the ranks
data_parallel/      other data on each rank: DDP, FSDP
scaling             a ring on larger worlds and other links, predicted
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

_attribute: Any
_attribute, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "data_parallel": ["benchmark_ddp", "train_with_ddp", "train_with_fsdp"],
        "launch": ["LaunchError"],
        "process_group": ["cleanup_ddp", "setup_ddp"],
        "ring": [
            "gather_sequence",
            "positions_of",
            "ring_attention",
            "ring_flash_attn_func",
            "ring_flash_attn_kvpacked_func",
            "ring_flash_attn_qkvpacked_func",
            "shard_sequence",
            "stripe_flash_attn_func",
            "stripe_flash_attn_kvpacked_func",
            "stripe_flash_attn_qkvpacked_func",
            "triton_ring_flash_attn_func",
            "unshard_sequence",
            "zigzag_ring_flash_attn_func",
            "zigzag_ring_flash_attn_kvpacked_func",
            "zigzag_ring_flash_attn_qkvpacked_func",
        ],
        "sequence_parallel": ["shard_model", "train_with_ring"],
    },
)

# Other names of ring-flash-attention, by a part of them, and what to use.
_INSTEAD = {
    "_flash_attn_varlen": "a ring has no packed documents. Give each document a ring of its own, "
    "or keep documents whole on a device, with labsupport.attention.attention_varlen",
    "llama3_flash_attn": "its lengths belong to packed documents, which no ring here has; see "
    "labsupport.attention.attention_varlen",
    "substitute_hf_flash_attn": "labsupport.training.from_transformers(model) makes a Decoder, "
    "which labsupport.distributed.shard_model computes around a ring",
    "update_ring_flash_attn_params": "a ring has no packed documents, and needs no lengths",
}


def __getattr__(name: str) -> Any:
    for part, instead in _INSTEAD.items():
        if part in name:
            raise ImportError(f"the lab has no {name}: {instead}.")
    return _attribute(name)
