"""A whole model's time and memory under different attention implementations, as a table.

The table has the columns of `labsupport.profiling.run_grid`, so that the same charts and ratios
apply. Weights and tokens are the same for all rows; only the attention function is exchanged.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from labsupport.attention import BackendUnavailableError
from labsupport.models.flops import head_dim_of, model_flops
from labsupport.models.integration.select import set_attention
from labsupport.models.integration.trace import attention_used, reset_attention_used
from labsupport.models.likelihood import negative_log_likelihood
from labsupport.profiling import measure_peak_memory, measure_time
from labsupport.profiling.health import warn_if_busy
from labsupport.profiling.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel

Direction = Literal["forward", "forward+backward"]

# Transformers' own implementations, by its own names: its textbook, and its call of SDPA.
TRANSFORMERS_OWN = ("eager", "sdpa")
# A longer call is timed while its memory is measured, and not a second time: counting some hundred
# allocations costs it less than a thousandth.
LONG_CALL_S = 0.2
# Tokens whose logits exist together: few, so that memory is attention's, not the vocabulary's.
CHUNK = 128


def choose_attention(model: PreTrainedModel, attention: str) -> None:
    """Give a model one of Transformers' own implementations, or one of the lab's backends.

    Args:
        attention: "eager" or "sdpa", or what `set_attention` takes.
    """
    if attention in TRANSFORMERS_OWN:
        model.set_attn_implementation(attention)
        reset_attention_used(model)
    else:
        set_attention(model, attention)


def kernels_used(model: PreTrainedModel) -> str:
    """Name the kernels that ran in a model since its attention was chosen."""
    kernels = dict.fromkeys(use.kernel for use in attention_used(model))
    return " and ".join(kernels) or f"Transformers' {model.config._attn_implementation}"


@warn_if_busy()
def measure_model(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    attentions: Sequence[str] = ("eager", "flash"),
    lengths: Sequence[int] = (512, 1024, 2048),
    direction: Direction = "forward",
    max_seconds: float = 1.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure time and extra memory of a language model on a text, by attention and length.

    Args:
        model: a causal language model; its attention is left at the last one measured.
        ids: (batch, seqlen) tokens, as long as the longest of `lengths`.
        attentions: "eager" and "sdpa" are Transformers' own; other names as in `set_attention`.
        lengths: how many of the tokens are taken.
        direction: "forward" evaluates the text (`negative_log_likelihood`); "forward+backward" is
            the model's loss and its gradients, which count as extra memory.
        max_seconds: time limit for the repeats of a short call.

    Returns:
        One row a case: backend, seqlen, batch, heads, kv_heads, head_dim, dtype, causal, direction;
        status and reason ("ok", "out of memory", "unsupported"); kernel, what really ran;
        median_ms, q1_ms, q3_ms, repeats; tokens_per_s; tflops, by the FLOPs of `model_flops`;
        peak_memory_bytes, beyond what existed before the call; loss, in nats a token. Provenance in
        `.attrs["provenance"]`.

    Raises:
        ValueError: `ids` is shorter than the longest length, a length below 2, an unknown
            direction.

    >>> story = load_model("stories15m", device="cpu")
    >>> ids = torch.arange(2, 66)[None]
    >>> table = measure_model(story.model, ids, lengths=(32,), max_seconds=0.1, progress=False)
    >>> table.status.tolist()
    ['ok', 'ok']
    """
    import pandas as pd
    from tqdm.auto import tqdm

    if ids.ndim != 2 or not lengths or not all(2 <= length <= ids.shape[1] for length in lengths):
        raise ValueError(
            f"lengths {list(lengths)}: from 2 to those of ids, {tuple(ids.shape)}, (batch, tokens)"
        )
    if direction not in get_args(Direction):
        known = ", ".join(get_args(Direction))
        raise ValueError(f"unknown direction {direction!r}; known: {known}")
    attentions = [attentions] if isinstance(attentions, str) else attentions
    config: Any = model.config
    cases = [(length, attention) for length in lengths for attention in attentions]
    record = provenance(model.device, model=config.model_type, direction=direction)
    rows = []
    for length, attention in tqdm(cases, disable=not progress, unit="case", leave=False):
        row: dict[str, Any] = {
            "backend": attention,
            "seqlen": length,
            "kv_seqlen": length,
            "batch": ids.shape[0],
            "heads": config.num_attention_heads,
            "kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
            "head_dim": head_dim_of(config),
            "dtype": str(model.dtype).removeprefix("torch."),
            "causal": True,
            "direction": direction,
            "status": "ok",
            "reason": "",
        }
        try:
            choose_attention(model, attention)
            row |= _measure(model, ids[:, :length], direction, max_seconds)
        except BackendUnavailableError as error:
            row |= {"status": "unsupported", "reason": " ".join(str(error).split())}
        except (torch.OutOfMemoryError, MemoryError) as error:
            row |= {"status": "out of memory", "reason": " ".join(str(error).split())}
        model.zero_grad(set_to_none=True)
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append(row)
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = record
    return table


def _measure(
    model: PreTrainedModel, ids: Tensor, direction: Direction, max_seconds: float
) -> dict[str, Any]:
    loss = seconds = 0.0

    def call() -> None:
        nonlocal loss, seconds
        start = time.perf_counter()
        if direction == "forward":
            loss = negative_log_likelihood(model, ids, chunk=CHUNK)
        else:
            model.zero_grad(set_to_none=True)
            result = model(ids, labels=ids, use_cache=False).loss
            result.backward()
            loss = float(result.detach())
        seconds = time.perf_counter() - start

    memory = measure_peak_memory(call, device=model.device)
    if model.device.type == "cpu" and seconds > LONG_CALL_S:
        ms = 1000 * seconds
        times = {"median_ms": ms, "q1_ms": ms, "q3_ms": ms, "repeats": 1}
    else:
        timing = measure_time(  # measuring the memory has warmed it up
            call, device=model.device, warmup=0, min_repeats=3, min_seconds=0.0,
            max_seconds=max_seconds,
        )  # fmt: skip
        times = {f"{name}_ms": getattr(timing, name) for name in ("median", "q1", "q3")}
        times["repeats"] = timing.repeats
    flops = model_flops(model, *ids.shape, backward=direction == "forward+backward")
    return {
        "kernel": kernels_used(model),
        "peak_memory_bytes": memory.peak_bytes,
        "loss": loss,
        **times,
        "tokens_per_s": 1000 * ids.numel() / times["median_ms"],
        "tflops": flops / times["median_ms"] / 1e9,
    }
