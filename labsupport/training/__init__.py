"""Training on long sequences, on one device (notebook 3).

data, tokens     documents, real or with facts planted in them, packed into sequences
config           the decoder's shape, its options to save memory, the settings of a run
decoder          a decoder in GPT-2's or Llama's shape, written to be read (convert: Transformers)
savings          ways to use less memory: parts at a time, activations in the host's memory
chunked_loss     a loss that never has all the logits
memory_limit     a limit on memory
planner/         the peak memory of a step, predicted part by part (measure: and measured)
train            the training loop: deterministic by step, so that a killed run continues exactly
checkpoint       a run on disk; history: what each step did
consistency      two attentions, trained side by side
tasks/           applications of longer contexts, each with a score
"""

from labsupport.training.checkpoint import CheckpointError, Checkpoints, ResumeError
from labsupport.training.chunked_loss import chunked_cross_entropy
from labsupport.training.config import PRESETS, DecoderConfig, MemoryOptions, TrainConfig
from labsupport.training.convert import from_transformers
from labsupport.training.data import (
    batches,
    documents_from,
    help_documents,
    pack,
    source_documents,
    tensors,
)
from labsupport.training.decoder import Decoder
from labsupport.training.history import History, StepRow
from labsupport.training.memory_limit import memory_limit
from labsupport.training.planner import measure_step, plan_memory, what_fits
from labsupport.training.tasks.facts import dialogue, records
from labsupport.training.tokens import ByteTokenizer, gpt2_tokenizer
from labsupport.training.train import TrainingDivergedError, train

__all__ = [
    "PRESETS",
    "ByteTokenizer",
    "CheckpointError",
    "Checkpoints",
    "Decoder",
    "DecoderConfig",
    "History",
    "MemoryOptions",
    "ResumeError",
    "StepRow",
    "TrainConfig",
    "TrainingDivergedError",
    "batches",
    "chunked_cross_entropy",
    "dialogue",
    "documents_from",
    "from_transformers",
    "gpt2_tokenizer",
    "help_documents",
    "measure_step",
    "memory_limit",
    "pack",
    "plan_memory",
    "records",
    "source_documents",
    "tensors",
    "train",
    "what_fits",
]
