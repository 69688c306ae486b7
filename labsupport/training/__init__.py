"""Training on long sequences, on one device (notebook 3).

documents/  text, real or with facts planted in it, packed into sequences of one length
model/      a decoder in GPT-2's or Llama's shape, written to be read
saving/     how to hold less at a time: the loss, the MLP; and a limit on memory that holds
planner/    the peak memory of a step, predicted part by part
loop/       the training loop: deterministic by step, so that a killed run continues exactly
tasks/      what longer contexts are good for, each with a score

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.training.documents.dialogue import dialogue as dialogue
    from labsupport.training.documents.facts import records as records
    from labsupport.training.documents.packing import Packed as Packed
    from labsupport.training.documents.packing import pack as pack
    from labsupport.training.documents.real import documents_of as documents_of
    from labsupport.training.documents.real import help_documents as help_documents
    from labsupport.training.documents.real import source_documents as source_documents
    from labsupport.training.documents.streams import batches as batches
    from labsupport.training.documents.streams import generated as generated
    from labsupport.training.documents.tokens import ByteTokenizer as ByteTokenizer
    from labsupport.training.documents.tokens import encode as encode
    from labsupport.training.documents.tokens import gpt2_tokenizer as gpt2_tokenizer
    from labsupport.training.loop.history import History as History
    from labsupport.training.loop.loop import train as train
    from labsupport.training.loop.settings import TrainSettings as TrainSettings
    from labsupport.training.model.config import DecoderConfig as DecoderConfig
    from labsupport.training.model.config import Savings as Savings
    from labsupport.training.model.convert import from_transformers as from_transformers
    from labsupport.training.model.convert import to_transformers as to_transformers
    from labsupport.training.model.decoder import Decoder as Decoder
    from labsupport.training.planner.fits import longest as longest
    from labsupport.training.planner.fits import what_fits as what_fits
    from labsupport.training.planner.measure import measure_step as measure_step
    from labsupport.training.planner.plan import MemoryPlan as MemoryPlan
    from labsupport.training.planner.plan import plan_memory as plan_memory
    from labsupport.training.saving.chunks import in_chunks as in_chunks
    from labsupport.training.saving.cross_entropy import (
        chunked_cross_entropy as chunked_cross_entropy,
    )
    from labsupport.training.saving.limit import memory_limit as memory_limit

_HOME = {
    "ByteTokenizer": "documents.tokens",
    "Decoder": "model.decoder",
    "DecoderConfig": "model.config",
    "History": "loop.history",
    "MemoryPlan": "planner.plan",
    "Packed": "documents.packing",
    "Savings": "model.config",
    "TrainSettings": "loop.settings",
    "batches": "documents.streams",
    "chunked_cross_entropy": "saving.cross_entropy",
    "dialogue": "documents.dialogue",
    "documents_of": "documents.real",
    "encode": "documents.tokens",
    "from_transformers": "model.convert",
    "generated": "documents.streams",
    "gpt2_tokenizer": "documents.tokens",
    "help_documents": "documents.real",
    "in_chunks": "saving.chunks",
    "longest": "planner.fits",
    "measure_step": "planner.measure",
    "memory_limit": "saving.limit",
    "pack": "documents.packing",
    "plan_memory": "planner.plan",
    "records": "documents.facts",
    "source_documents": "documents.real",
    "to_transformers": "model.convert",
    "train": "loop.loop",
    "what_fits": "planner.fits",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
