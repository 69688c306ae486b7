"""Prefill and training, measured: one forward, or one step, under each attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.generation import Row, attempt, times
from benchmarks.generation_models import (
    gpt2,
    llama_1b,
    random_ids,
    tiny_llama,
)
from labsupport.attention import BackendUnavailableError, available_backends
from labsupport.attention.flash_triton import mode
from labsupport.models.flops import model_flops
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.timing import measure_time

MAX_SECONDS = {"cuda": 3.0, "cpu": 0.2}  # for the repeats of one case; a CPU's sizes are tiny
TRAINING = ("eager", "sdpa_flash", "flash_triton", "fa4")


def prefill_cases(device: torch.device, ceilings: Ceilings) -> list[Callable[[], Row]]:
    """Every IO-aware backend that runs, and Transformers' own `sdpa`; as it is, and compiled."""
    gpu = device.type == "cuda"
    # Compiling for a CPU takes a compiler that not every machine has.
    return [
        _prefill(name, compiled, device, ceilings, *((4, 8192) if gpu else (2, 128)))
        for name in ("sdpa", *io_aware_backends(device))
        for compiled in ((False, True) if gpu else (False,))
    ]


def training_cases(device: torch.device, ceilings: Ceilings) -> list[Callable[[], Row]]:
    """GPT-2 medium, 8192 tokens a step, sequences of 1024 to 8192."""
    gpu = device.type == "cuda"
    tokens, lengths = (8192, (1024, 2048, 4096, 8192)) if gpu else (128, (64, 128))
    return [
        _training(name, device, tokens // length, length) for length in lengths for name in TRAINING
    ]


def io_aware_backends(device: torch.device) -> list[str]:
    """Those that run causal, grouped-query attention here, and are worth timing.

    Not those in plain Python or interpreted, nor on a CPU FlexAttention, which asks for a compiler.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.zeros(1, 128, 32, 64, dtype=dtype, device=device)
    k = torch.zeros(1, 128, 8, 64, dtype=dtype, device=device)
    slow = {"flash_torch"} if device.type == "cuda" else {"flash_torch", "flex"}
    slow |= {"flash_triton"} if mode.interpreted() else set()
    statuses = available_backends(q, k, k, causal=True)
    return [s.name for s in statuses if s.runs and s.io_aware and s.name not in slow]


def _prefill(
    name: str, compiled: bool, device: torch.device, ceilings: Ceilings, batch: int, seqlen: int
) -> Callable[[], Row]:
    from labsupport.models.integration.used import attention_used
    from labsupport.models.measure import choose_attention

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype_name = str(dtype).removeprefix("torch.")
    row: Row = {"name": name, "compiled": compiled, "batch": batch, "seqlen": seqlen}
    row |= {"new_tokens": 0, "dtype": dtype_name, "kernel": ""}

    def measure() -> Row:
        model = (llama_1b if device.type == "cuda" else tiny_llama)(device, dtype, seqlen)
        choose_attention(model, name)
        ids = random_ids(model, batch, seqlen)
        forward = torch.compile(model) if compiled else model

        @torch.no_grad()
        def call() -> object:
            return forward(ids, use_cache=True, logits_to_keep=1)

        memory = measure_peak_memory(call, device=device)
        timing = measure_time(call, device=device, max_seconds=MAX_SECONDS[device.type])
        tflops = model_flops(model, batch, seqlen, logits=1) / timing.median / 1e9
        ceiling = ceilings.matmul_tflops[dtype_name]
        kernels = dict.fromkeys(use.kernel for use in attention_used(model))
        return times(timing) | {
            "tokens_per_s": 1e3 * ids.numel() / timing.median,
            "tflops": tflops,
            "ceiling": ceiling,
            "of_ceiling": tflops / ceiling,
            "peak_memory_bytes": memory.peak_bytes,
            "kernel": " and ".join(kernels) or f"Transformers' {name}",
        }

    return lambda: attempt(row, measure)


def _training(name: str, device: torch.device, batch: int, seqlen: int) -> Callable[[], Row]:
    from labsupport.models.integration.used import attention_used
    from labsupport.models.measure import choose_attention

    gpu = device.type == "cuda"
    row: Row = {"name": name, "compiled": False, "batch": batch, "seqlen": seqlen}
    row |= {"new_tokens": 0, "dtype": "autocast bfloat16" if gpu else "float32", "kernel": ""}

    def measure() -> Row:
        if name == "flash_triton" and mode.interpreted():
            raise BackendUnavailableError("interpreted kernels are not worth timing", {})
        model = gpt2(device, medium=gpu, length=seqlen).train()
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            choose_attention(model, name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=gpu)
        ids = random_ids(model, batch, seqlen)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()  # makes the optimizer's state, which is not a step's own memory
        memory = measure_peak_memory(step, device=device)
        timing = measure_time(step, device=device, max_seconds=MAX_SECONDS[device.type])
        kernels = dict.fromkeys(use.kernel for use in attention_used(model))
        return times(timing) | {
            "tokens_per_s": 1e3 * ids.numel() / timing.median,
            "peak_memory_bytes": memory.peak_bytes,
            "kernel": " and ".join(kernels) or f"Transformers' {name}",
        }

    return lambda: attempt(row, measure)
