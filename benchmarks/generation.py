"""Speed of decoding, prefill and training, beside the bound of each.

python -m benchmarks generation                       everything that fits here
python -m benchmarks generation --what decode --save NAME

    decode       tokens/s of the loops, beside the memory bandwidth's bound
    throughput   tokens/s against the time of a step, by batch
    prefill      FLOP/s of a forward, beside a matrix product's, by attention
    training     time and memory of a training step, by attention and length

On a GPU the models have real shapes, on a CPU tiny ones; the weights are random.

Columns: what, name, compiled, batch, seqlen (prompt or sequence), new_tokens, dtype; kernel;
median_ms, q1_ms, q3_ms, repeats (of a decode step, a prefill, a training step); tokens_per_s;
tflops (prefill); ceiling (decode: tokens/s at the measured copy bandwidth; prefill: the measured
TFLOP/s of a matrix product) and of_ceiling, the part of it that was reached; peak_memory_bytes,
beyond what there was before.
"""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.generation_models import decode_bytes, gpt2, llama, random_ids
from benchmarks.runner import Case, Row, run, some_of
from labsupport.attention import BackendUnavailableError, available_backends
from labsupport.attention.kernels import mode
from labsupport.models.flops import model_flops
from labsupport.models.generation.generate import prefill_and_decode
from labsupport.models.generation.graphed import GraphedDecoder
from labsupport.models.generation.memory import MemorySampler
from labsupport.models.generation.prompts import Batch
from labsupport.models.integration.used import attention_used
from labsupport.models.measure import choose_attention
from labsupport.profiling.hardware import Ceilings, measured_ceilings
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.timing import Timing, format_ms, measure_time, now, resolve_device
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("decode", "throughput", "prefill", "training")
# What each loop is. "loop" is the one in generate.py, "transformers" is `model.generate`.
LOOPS = (
    "loop, dynamic cache",
    "loop, static cache",
    "transformers, dynamic cache",
    "transformers, static cache",
    "graphed",
)
TRAINING = ("eager", "sdpa_flash", "flash_triton", "fa4")
REPEATS = 3  # of a decode
MAX_SECONDS = {"cuda": 3.0, "cpu": 0.2}  # for the repeats of one case; a CPU's sizes are tiny


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--what", type=some_of(PARTS), default=list(PARTS), help="comma-separated parts"
    )


def measure(options: Namespace) -> pd.DataFrame:
    device = resolve_device(options.device)
    ceilings = measured_ceilings(str(device))
    chosen = [case for case in cases(device, ceilings) if case.row["what"] in options.what]
    about = {"copy_gb_s": ceilings.copy_gb_s, "matmul_tflops": ceilings.matmul_tflops}
    return run(chosen, device, weights="random", **about)


def show(table: pd.DataFrame, options: Namespace) -> str:
    header = ["what", "name", "batch", "seqlen", "ms", "IQR", "tokens/s", "of ceiling", "memory"]
    lines = [[*header, "kernel or reason"]]
    for _, row in table.iterrows():
        name = f"{row['name']}, compiled" if row["compiled"] is True else row["name"]
        start = [row["what"], name, str(row["batch"]), str(row["seqlen"])]
        if row["status"] != "ok":
            lines.append([*start, *5 * ["-"], f"{row['status']}: {row['reason']}"])
            continue
        share = row.get("of_ceiling", float("nan"))
        lines.append(
            [
                *start,
                format_ms(row["median_ms"]),
                f"{format_ms(row['q1_ms'])}-{format_ms(row['q3_ms'])}",
                f"{row['tokens_per_s']:,.0f}",
                "-" if share != share else f"{share:.1%}",
                format_bytes(row["peak_memory_bytes"]),
                row["kernel"],
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    return "\n".join([f"{table.attrs['provenance']['device']}; random weights", *text])


def cases(device: torch.device, ceilings: Ceilings) -> Iterator[Case]:
    """All parts, one after the other."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32

    def case(
        what: str, function: Callable[..., Row], name: str, batch: int, seqlen: int, **more: Any
    ) -> Case:
        row = {"what": what, "name": name, "compiled": False, "batch": batch, "seqlen": seqlen}
        row |= {"new_tokens": 0, "dtype": str(dtype).removeprefix("torch."), "kernel": ""} | more
        return Case(row, _alone()(partial(function, row, device, dtype, ceilings)))

    prompt, new = (128, 256) if gpu else (16, 32)
    for batch in (1, 8) if gpu else (1, 2):
        for name in LOOPS:
            # On a GPU, Transformers compiles the steps with its static cache.
            compiled = gpu and name == "transformers, static cache"
            yield case("decode", _decode, name, batch, prompt, new_tokens=new, compiled=compiled)
    # A larger batch waits longer for a step, and gets more out of it. Each batch is a compilation
    # of minutes for the graphed loop, so there are fewer.
    for name, batches in {
        "loop, dynamic cache": (1, 2, 4, 8, 16, 32) if gpu else (1, 2, 4),
        "graphed": (1, 8, 32) if gpu else (1, 4),
    }.items():
        for batch in batches:
            yield case("throughput", _decode, name, batch, prompt, new_tokens=256 if gpu else 16)
    for name in ("sdpa", *io_aware_backends(device)):
        # Compiling for a CPU takes a compiler that not every machine has.
        for compiled in (False, True) if gpu else (False,):
            batch, seqlen = (4, 8192) if gpu else (2, 128)
            yield case("prefill", _prefill, name, batch, seqlen, compiled=compiled)
    tokens, lengths = (8192, (1024, 2048, 4096, 8192)) if gpu else (128, (64, 128))
    mixed = "autocast bfloat16" if gpu else "float32"
    for seqlen in lengths:
        for name in TRAINING:
            yield case("training", _training, name, tokens // seqlen, seqlen, dtype=mixed)


@contextmanager
def _alone() -> Iterator[None]:
    """Drop what a case compiled before the next one, and compilers' warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about small devices
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch._dynamo.reset()


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


def _times(timing: Timing) -> dict[str, Any]:
    names = ("median", "q1", "q3")
    return {f"{name}_ms": getattr(timing, name) for name in names} | {"repeats": timing.repeats}


def _kernel(model: Any, name: str) -> str:
    kernels = dict.fromkeys(use.kernel for use in attention_used(model))
    return " and ".join(kernels) or f"Transformers' {name}"


def _decode(row: Row, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Row:
    name, batch, new = row["name"], row["batch"], row["new_tokens"]
    model = llama("110M", device, dtype)
    model.set_attn_implementation("sdpa")
    ids = Batch(random_ids(model, batch, row["seqlen"]), (row["seqlen"],) * batch)
    kernel, compiled, cache = "SDPA", row["compiled"], "static" if "static" in name else "dynamic"
    loop: Callable[[], float]  # seconds of the decode steps
    if name == "graphed":
        decoder = GraphedDecoder(model, batch=batch, length=row["seqlen"] + new)
        kernel, compiled = decoder.how, decoder.how.startswith("compiled")
        loop = lambda: decoder.run(ids, new).decode_s  # noqa: E731
    elif name.startswith("loop"):
        loop = lambda: prefill_and_decode(model, ids, new, cache=cache).decode_s  # noqa: E731
    else:
        loop = partial(_transformers_own, model, ids, new, cache)
    loop()
    with MemorySampler(device) as memory:
        steps = Timing(tuple(1e3 * loop() / (new - 1) for _ in range(REPEATS)), str(device))
    ceiling = batch * ceilings.copy_gb_s * 1e9 / decode_bytes(model, batch, row["seqlen"] + new / 2)
    rate = 1e3 * batch / steps.median
    return _times(steps) | {
        "compiled": compiled,
        "tokens_per_s": rate,
        "ceiling": ceiling,
        "of_ceiling": rate / ceiling,
        "peak_memory_bytes": memory.peak_bytes,
        "kernel": kernel,
    }


def _transformers_own(model: Any, ids: Batch, new: int, cache: str) -> float:
    """`model.generate` says no times: a long call less one that ends after the first token."""

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


def _prefill(row: Row, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Row:
    model = llama("1B", device, dtype)
    choose_attention(model, row["name"])
    ids = random_ids(model, row["batch"], row["seqlen"])
    forward = torch.compile(model) if row["compiled"] else model

    @torch.no_grad()
    def call() -> object:
        return forward(ids, use_cache=True, logits_to_keep=1)

    memory = measure_peak_memory(call, device=device)
    timing = measure_time(call, device=device, max_seconds=MAX_SECONDS[device.type])
    tflops = model_flops(model, *ids.shape, logits=1) / timing.median / 1e9
    ceiling = ceilings.matmul_tflops[row["dtype"]]
    return _times(timing) | {
        "tokens_per_s": 1e3 * ids.numel() / timing.median,
        "tflops": tflops,
        "ceiling": ceiling,
        "of_ceiling": tflops / ceiling,
        "peak_memory_bytes": memory.peak_bytes,
        "kernel": _kernel(model, row["name"]),
    }


def _training(row: Row, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Row:
    """GPT-2 medium on a GPU, a tiny one on a CPU."""
    if row["name"] == "flash_triton" and mode.interpreted():
        raise BackendUnavailableError("interpreted kernels are not worth timing", {})
    gpu = device.type == "cuda"
    model = gpt2(device, medium=gpu, length=row["seqlen"]).train()
    with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
        choose_attention(model, row["name"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=gpu)
    ids = random_ids(model, row["batch"], row["seqlen"])

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # makes the optimizer's state, which is not a step's own memory
    memory = measure_peak_memory(step, device=device)
    timing = measure_time(step, device=device, max_seconds=MAX_SECONDS[device.type])
    return _times(timing) | {
        "tokens_per_s": 1e3 * ids.numel() / timing.median,
        "peak_memory_bytes": memory.peak_bytes,
        "kernel": _kernel(model, row["name"]),
    }
