"""Decode, measured: the loops beside the bandwidth's bound, and batches of many sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.generation import Row, attempt, times
from benchmarks.generation_models import (
    decode_bytes,
    llama_110m,
    random_ids,
    tiny_llama,
)
from labsupport.models.generation.generate import prefill_and_decode
from labsupport.models.generation.graphed import GraphedDecoder
from labsupport.models.generation.memory import MemorySampler
from labsupport.models.generation.prompts import Batch
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.timing import Timing, now

Loop = Callable[[Batch, int], float]  # seconds of the decode steps
REPEATS = 3

# What each loop is. "loop" is the one in generate.py, "transformers" is `model.generate`.
LOOPS = (
    "loop, dynamic cache",
    "loop, static cache",
    "transformers, dynamic cache",
    "transformers, static cache",
    "graphed",
)


def decode_cases(device: torch.device, ceilings: Ceilings) -> list[Callable[[], Row]]:
    """Batch 1 and 8, every loop."""
    gpu = device.type == "cuda"
    prompt, new = (128, 256) if gpu else (16, 32)
    return [
        _case(name, device, ceilings, batch, prompt, new)
        for batch in ((1, 8) if gpu else (1, 2))
        for name in LOOPS
    ]


def throughput_cases(device: torch.device, ceilings: Ceilings) -> list[Callable[[], Row]]:
    """Batches of 1 to 32: a larger one waits longer for a step, and gets more out of it."""
    gpu = device.type == "cuda"
    prompt, new = (128, 256) if gpu else (16, 16)
    # Each batch is a compilation of minutes for the graphed loop: a few of them tell the same.
    cases = {
        "loop, dynamic cache": (1, 2, 4, 8, 16, 32) if gpu else (1, 2, 4),
        "graphed": (1, 8, 32) if gpu else (1, 4),
    }
    return [
        _case(name, device, ceilings, batch, prompt, new)
        for name, batches in cases.items()
        for batch in batches
    ]


def _case(
    name: str, device: torch.device, ceilings: Ceilings, batch: int, prompt: int, new: int
) -> Callable[[], Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    by_itself = name == "transformers, static cache" and device.type == "cuda"
    row: Row = {"name": name, "compiled": by_itself, "batch": batch, "seqlen": prompt}
    row |= {"new_tokens": new, "dtype": str(dtype).removeprefix("torch."), "kernel": ""}

    def measure() -> Row:
        model = (llama_110m if device.type == "cuda" else tiny_llama)(device, dtype)
        model.set_attn_implementation("sdpa")
        ids = Batch(random_ids(model, batch, prompt), (prompt,) * batch)
        loop = _loop(name, model, batch, prompt + new)
        loop(ids, new)
        with MemorySampler(device) as memory:
            steps = Timing(
                tuple(1e3 * loop(ids, new) / (new - 1) for _ in range(REPEATS)), str(device)
            )
        read = decode_bytes(model, batch, prompt + new / 2)
        ceiling = batch * ceilings.copy_gb_s * 1e9 / read
        rate = 1e3 * batch / steps.median
        kernel = loop.how if isinstance(loop, _Graphed) else ""
        return times(steps) | {
            "compiled": loop.compiled if isinstance(loop, _Graphed) else row["compiled"],
            "tokens_per_s": rate,
            "ceiling": ceiling,
            "of_ceiling": rate / ceiling,
            "peak_memory_bytes": memory.peak_bytes,
            "kernel": kernel or "SDPA",
        }

    return lambda: attempt(row, measure)


class _Graphed:
    def __init__(self, model: Any, batch: int, length: int) -> None:
        self.decoder = GraphedDecoder(model, batch=batch, length=length)
        self.how = self.decoder.how
        self.compiled = self.how.startswith("compiled")

    def __call__(self, ids: Batch, new: int) -> float:
        return self.decoder.run(ids, new).decode_s


def _loop(name: str, model: Any, batch: int, length: int) -> Loop:
    if name == "graphed":
        return _Graphed(model, batch, length)
    cache: Any = "static" if "static" in name else "dynamic"
    if name.startswith("loop"):
        return lambda ids, new: prefill_and_decode(model, ids, new, cache=cache).decode_s
    return lambda ids, new: _transformers_own(model, ids, new, cache)


def _transformers_own(model: Any, ids: Batch, new: int, cache: str) -> float:
    """`model.generate` says no times: a long call less one that ends after the first token.

    With the static cache on a GPU, it compiles the decode steps by itself.
    """

    def seconds(count: int) -> float:
        start = now(model.device)
        model.generate(
            ids.ids,
            attention_mask=torch.ones_like(ids.ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation=cache,
            pad_token_id=0,
        )
        return now(model.device) - start

    return seconds(new) - seconds(1)
