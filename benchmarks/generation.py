"""Speed of models with random weights: decoding, prefill, an encoder, training; and bounds.

python -m benchmarks generation                       everything that fits here
python -m benchmarks generation --what decode --save NAME

    decode     tokens/s of the loops, and the memory bandwidth's bound
    prefill    FLOP/s of a forward, and of a matrix product, by attention
    encoder    time and memory of a forward of a BERT, by attention and length
    training   time and memory of a training step of GPT-2 medium, by attention and length

"graphed" is the lab's loop, greedy or with temperature 0.8 and top-k 50; it needs a GPU.

Only shapes matter for speed, so the weights are random. On a GPU the models have real shapes, on a
CPU tiny ones.

Columns: what, name, compiled, batch, seqlen (prompt or sequence), new_tokens, dtype; kernel;
median_ms, q1_ms, q3_ms, repeats (of a decode step, a prefill, a training step); tokens_per_s;
tflops (prefill); ceiling (decode: tokens/s at the measured copy bandwidth; prefill: the measured
TFLOP/s of a matrix product) and of_ceiling, the part of it that was reached; peak_memory_bytes,
beyond what there was before.
"""

import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.runner import Row, Trial, keep_rows, not_measured, run, some_of, spread
from labsupport.attention.kernels import mode
from labsupport.models.flops import model_flops
from labsupport.models.generation.cuda_graph import GraphedDecoder
from labsupport.models.generation.generate import prefill_and_decode
from labsupport.models.generation.memory_sampler import MemorySampler
from labsupport.models.generation.prompts import Batch, Sampler
from labsupport.models.measure import choose_attention, kernels_used
from labsupport.profiling.hardware import Ceilings, measured_ceilings
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.timing import Timing, measure_time, now, resolve_device
from labsupport.profiling.units import format_bytes

PARTS = ("decode", "prefill", "encoder", "training")
# "loop" is the one in generate.py, "transformers" is `model.generate`.
LOOPS = (
    "graphed",
    "graphed, sampled",
    "transformers, static cache",
    "transformers, dynamic cache",
    "loop, static cache",
    "loop, dynamic cache",
)
PREFILL = ("sdpa", "sdpa_cudnn", "sdpa_flash", "flex", "flash_triton")
ENCODER = ("eager", "sdpa", "sdpa_flash", "sdpa_cudnn", "flash_triton", "flash_gluon")
TRAINING = ("eager", "sdpa_flash", "sdpa_cudnn", "flash_triton", "flash_gluon", "fa4")
# For the repeats of one case; a CPU's sizes are tiny.
REPEATS, MIN_SECONDS = 2, {"cuda": 1.0, "cpu": 0.0}
MAX_SECONDS = {"cuda": 3.0, "cpu": 0.2}
# Width, MLP width, layers, query heads, key heads, vocabulary.
LLAMAS = {
    "110M": (768, 2048, 12, 12, 12, 32_000),  # stories110M (llama2.c)
    "1B": (2048, 8192, 16, 32, 8, 128_256),  # Llama 3.2 1B
    "tiny": (64, 128, 2, 4, 2, 256),
}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--what", type=some_of(PARTS), default=list(PARTS), help="comma-separated parts"
    )


def measure(options: Namespace) -> pd.DataFrame:
    device = resolve_device(options.device)
    ceilings = measured_ceilings(str(device))
    chosen = [case for case in cases(device, ceilings) if case.row["what"] in options.what]
    about = {"copy_gb_s": ceilings.copy_gb_s, "matmul_tflops": ceilings.matmul_tflops}
    return run(chosen, device, on_rows=keep_rows(options), weights="random", **about)


def show(table: pd.DataFrame, options: Namespace) -> str:
    columns = ["what", "name", "compiled", "batch", "seqlen", "median_ms", "q1_ms", "q3_ms"]
    columns += ["tokens_per_s", "of_ceiling", "peak_memory_bytes", "kernel"]
    shown = table[table.status == "ok"].reindex(columns=columns)
    shown["peak_memory_bytes"] = shown.peak_memory_bytes.map(format_bytes)
    text = shown.to_string(index=False, na_rep="-", float_format="{:,.3f}".format)
    head = f"{table.attrs['provenance']['device']}; random weights"
    return "\n".join([head, text, *not_measured(table, "what", "name")])


def cases(device: torch.device, ceilings: Ceilings) -> Iterator[Trial]:
    """All parts, one after the other."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32

    def case(
        what: str, function: Callable[..., Row], name: str, batch: int, seqlen: int, **more: Any
    ) -> Trial:
        row = {"what": what, "name": name, "compiled": False, "batch": batch, "seqlen": seqlen}
        row |= {"new_tokens": 0, "dtype": str(dtype).removeprefix("torch."), "kernel": ""} | more

        def alone() -> Row:
            if name == "flash_triton" and mode.interpreted():
                raise NotImplementedError("interpreted kernels are not worth timing")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # compilers' warnings about small devices
                if gpu:
                    torch._dynamo.reset()  # what the case before compiled
                return function(row, device, dtype, ceilings)

        return Trial(row, alone)

    prompt, new = (128, 256) if gpu else (16, 32)
    for name in LOOPS:
        for batch in (1, 8, 64) if gpu else (1,):
            if name.startswith("graphed") and not gpu:
                continue
            # On a GPU, Transformers compiles the steps with its static cache.
            compiled = gpu and name == "transformers, static cache"
            yield case("decode", _decode, name, batch, prompt, new_tokens=new, compiled=compiled)
    # Compiling for a CPU, as FlexAttention does, takes a compiler that not every machine has.
    for name in PREFILL if gpu else ("sdpa", "sdpa_flash"):
        for compiled in (False, True) if gpu else (False,):
            batch, seqlen = (4, 8192) if gpu else (2, 128)
            yield case("prefill", _prefill, name, batch, seqlen, compiled=compiled)
    tokens, lengths = (8192, (1024, 2048, 4096, 8192)) if gpu else (128, (64, 128))
    for seqlen in lengths:
        for name in ENCODER if gpu else ENCODER[:3]:
            yield case("encoder", _encoder, name, tokens // seqlen, seqlen)
    mixed = "autocast bfloat16" if gpu else "float32"
    for seqlen in lengths:
        for name in TRAINING:
            yield case("training", _training, name, tokens // seqlen, seqlen, dtype=mixed)


def _decode(row: Row, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Row:
    name, batch, new = row["name"], row["batch"], row["new_tokens"]
    model = llama("110M", device, dtype)
    model.set_attn_implementation("sdpa")
    ids = Batch(random_ids(model, batch, row["seqlen"]), (row["seqlen"],) * batch)
    kernel, cache = "SDPA", "static" if "static" in name else "dynamic"
    loop: Callable[[], float]  # seconds of the decode steps
    if name.startswith("graphed"):
        sample = Sampler(device, temperature=0.8, top_k=50) if "sampled" in name else None
        decoder = GraphedDecoder(model, batch=batch, length=row["seqlen"] + new, sample=sample)
        kernel = "the lab's, in one CUDA graph"
        loop = lambda: decoder.run(ids, new).decode_s  # noqa: E731
    elif name.startswith("loop"):
        loop = lambda: prefill_and_decode(model, ids, new, cache=cache).decode_s  # noqa: E731
    else:
        loop = partial(_transformers_own, model, ids.ids, new, cache)
    loop()
    seconds: list[float] = []
    with MemorySampler(device) as memory:
        while len(seconds) < REPEATS or sum(seconds) < MIN_SECONDS[device.type]:
            seconds.append(loop())
    steps = Timing(tuple(1e3 * one / (new - 1) for one in seconds), str(device))
    ceiling = batch * ceilings.copy_gb_s * 1e9 / decode_bytes(model, batch, row["seqlen"] + new / 2)
    rate = 1e3 * batch / steps.median
    return spread(steps) | {
        "tokens_per_s": rate,
        "ceiling": ceiling,
        "of_ceiling": rate / ceiling,
        "peak_memory_bytes": memory.peak_bytes,
        "kernel": kernel,
    }


def _transformers_own(model: Any, ids: Tensor, new: int, cache: str) -> float:
    """`model.generate` says no times: a long call less one that ends after the first token."""
    options: dict[str, Any] = {"do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)

    def seconds(count: int) -> float:
        start = now(model.device)
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
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

    measured = _measured(call, model, ids)
    tflops = model_flops(model, *ids.shape, logits=1) / measured["median_ms"] / 1e9
    ceiling = ceilings.matmul_tflops[row["dtype"]]
    return measured | {"tflops": tflops, "ceiling": ceiling, "of_ceiling": tflops / ceiling}


def _encoder(row: Row, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Row:
    """A forward of BERT base's shape (110 million weights) on a GPU, of a tiny one on a CPU."""
    from transformers import BertConfig, BertModel

    shape: dict[str, Any] = {"max_position_embeddings": row["seqlen"]}
    if device.type == "cpu":
        shape |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "vocab_size": 256}
    with torch.device(device):
        model: Any = BertModel(BertConfig(**shape), add_pooling_layer=False)
        model = model.to(dtype).eval()
    choose_attention(model, row["name"])
    ids = random_ids(model, row["batch"], row["seqlen"])

    @torch.no_grad()
    def call() -> object:
        return model(ids)

    return _measured(call, model, ids)


def _training(row: Row, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Row:
    """A step of GPT-2 medium's shape (345 million weights) on a GPU, of a tiny one on a CPU."""
    from transformers import GPT2Config

    gpu = device.type == "cuda"
    shape: dict[str, Any] = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50_257}
    if not gpu:
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
    dropout: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = GPT2Config(**shape, **dropout, n_positions=row["seqlen"], **NO_MARKS)
    model = _made(config, device, torch.float32).train()
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
    return _measured(step, model, ids)


def _measured(call: Callable[[], object], model: Any, ids: Tensor) -> dict[str, Any]:
    memory = measure_peak_memory(call, device=model.device)
    kind = model.device.type
    least, most = MIN_SECONDS[kind], MAX_SECONDS[kind]
    timing = measure_time(call, device=model.device, min_seconds=least, max_seconds=most)
    return spread(timing) | {
        "tokens_per_s": 1e3 * ids.numel() / timing.median,
        "peak_memory_bytes": memory.peak_bytes,
        "kernel": kernels_used(model),
    }


# --- models with random weights -------------------------------------------------------------------

NO_MARKS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # no text begins or ends


def llama(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of one of `LLAMAS`; on a CPU always the tiny one."""
    from transformers import LlamaConfig

    shape = LLAMAS[size if device.type == "cuda" else "tiny"]
    width, mlp, layers, heads, kv_heads, vocabulary = shape
    config = LlamaConfig(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=True, **NO_MARKS,
    )  # fmt: skip
    return _made(config, device, dtype).eval()


def _made(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def random_ids(model: Any, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen) tokens, the same for the same shape."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, seqlen), generator=generator)
    return ids.to(model.device)


def decode_bytes(model: Any, batch: int, cached: float) -> float:
    """Bytes that one decode step must read: the weights, and `cached` keys and values a row.

    Tied input and output embeddings are one matrix, and all of it is read for the output.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return (weights + batch * cached * cache) * model.dtype.itemsize
