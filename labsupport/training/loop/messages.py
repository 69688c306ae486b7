"""What `labsupport train` says: what it will do, what came of it, and what helps without memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from labsupport.precision import FlashAttentionConfig
from labsupport.precision.dtypes import short
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    from labsupport.attention.backends import CallReport
    from labsupport.training.loop.history import History
    from labsupport.training.loop.settings import TrainSettings
    from labsupport.training.model.config import DecoderConfig, Savings


def plan(
    config: DecoderConfig,
    savings: Savings,
    settings: TrainSettings,
    length: int,
    where: torch.device,
) -> str:
    """What will be trained, in two lines: model and step; how memory is saved."""
    heads = f"{config.heads} heads"
    if config.key_heads != config.heads:
        heads += f" on {config.key_heads}"
    each = "" if settings.accumulation == 1 else f" ({settings.accumulation} x {length:,})"
    kept = "each block's input is kept" if savings.checkpoint else "all activations are kept"
    if savings.residual is not None:
        kept += f", residual stream in {short(savings.residual)}"
    for part, chunk in (("MLP", savings.mlp_chunk), ("loss", savings.loss_chunk)):
        kept += f", {part} at once" if chunk is None else f", {part} in chunks of {chunk:,} tokens"
    positions = "rotary positions"
    if config.positions == "learned":
        positions = f"{config.max_positions:,} learned positions"
    else:
        if config.rope_base != 10_000:
            positions += f", base {config.rope_base:,.0f}"
        if config.rope_scaling != 1:
            positions += f", divided by {config.rope_scaling:g}"
    return (
        f"{config.parameters / 1e6:.1f}M parameters ({config.layers} layers of {config.width}, "
        f"{heads}, {config.mlp}, {positions}), "
        f"{settings.accumulation * length:,} tokens a step{each}, {_computes_in(settings)} on "
        f"{where}\n{kept}; attention: {savings.attention}"
    )


def summary(history: History, where: torch.device, call: CallReport | None) -> str:
    """What came of it: losses, speed, memory, and which attention really ran (None: none)."""
    first, last = history.rows[0], history.rows[-1]
    whose = "" if where.type == "cuda" else ", the whole program's"
    skipped = sum(row.skipped for row in history)
    lines = [
        f"loss       {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}",
        f"speed      {history.tokens_per_s:,.0f} tokens/s (median step)",
        f"memory     {format_bytes(history.peak_bytes)} at the peak{whose}",
        f"attention  {call}" if call else "attention  none ran: the run in the folder is complete",
    ]
    if skipped:
        lines.insert(1, f"skipped    {skipped} steps, whose float16 gradients overflowed")
    return "\n".join(lines)


def out_of_memory(
    error: BaseException, savings: Savings, settings: TrainSettings, length: int
) -> str:
    """One message: what happened, and what helps that is not in use yet, the best first."""
    remedies = []
    if savings.attention in ("standard", "sdpa_math"):
        remedies.append("--attention auto: no matrix of length x length is stored")
    if savings.loss_chunk is None:
        remedies.append("--loss-chunk 1024: never all the logits; costs no time")
    if not savings.checkpoint:
        remedies.append("--checkpoint-layers: a block's input is kept, the rest computed twice")
    if savings.mlp_chunk is None:
        remedies.append("--mlp-chunk 4096: the MLP's wide tensors exist for some tokens at a time")
    policy = settings.policy or FlashAttentionConfig.float32()
    if settings.autocast is None and policy.mlp == torch.float32:
        remedies.append("--dtype bfloat16: activations of two bytes, not four")
    if (savings.residual or policy.residual) == torch.float32:
        remedies.append("--residual bfloat16: what is kept between blocks takes half")
    remedies.append(f"--length {max(length // 2, 1)}, or a smaller --preset")
    # Without PyTorch's hints, and those of memory_limit, which are for Python.
    head = re.split(r"Of the allocated memory|What helps,", " ".join(str(error).split()))[0].strip()
    listed = "\n".join(f"  {place}. {text}" for place, text in enumerate(remedies, 1))
    return f"labsupport: {head}\nWhat helps, in this order:\n{listed}"


def _computes_in(settings: TrainSettings) -> str:
    if settings.policy is None:
        return short(settings.autocast or torch.float32)
    weights = settings.policy.mlp
    masters = "" if weights == settings.policy.optimizer else ", with masters,"
    return f"{short(weights)} policy{masters}"
