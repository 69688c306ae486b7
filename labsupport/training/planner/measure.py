"""A real training step, measured, beside its plan."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from labsupport.profiling.memory import MemoryUse, measure_peak_memory
from labsupport.training.model import Decoder, DecoderConfig, Savings
from labsupport.training.planner.plan import Optimizer, plan_memory

if TYPE_CHECKING:
    import pandas as pd


def measure_step(
    config: DecoderConfig,
    *,
    seqlen: int,
    batch: int = 1,
    savings: Savings | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    optimizer: Optimizer | None = "auto",
    accumulation: int = 1,
) -> MemoryUse:
    """The peak of one training step on random tokens, all it needs included, measured.

    Everything is made inside of the measurement: the weights, AdamW's states (by an update with
    gradients of zero), then tokens and the step itself. So `peak_bytes` is what `plan_memory`
    predicts for the same arguments; on a CPU it is exact to the byte.

    Raises:
        torch.OutOfMemoryError: the step does not fit.
    """
    where = torch.device(device)
    choice: dict[str, Any] = {"foreach": optimizer == "foreach", "fused": optimizer == "fused"}
    if optimizer == "auto":
        choice = {"fused": True}

    def everything() -> None:
        torch.manual_seed(0)
        with where:
            model = Decoder(config, savings)
        update = None
        if optimizer is not None:
            update = torch.optim.AdamW(model.parameters(), **choice)
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            update.step()
            update.zero_grad(set_to_none=True)
        tokens = torch.randint(config.vocab_size, (batch, seqlen), device=where)
        labels = torch.randint(config.vocab_size, (batch, seqlen), device=where)
        for _ in range(accumulation):
            with torch.autocast(where.type, dtype=autocast, enabled=autocast is not None):
                loss = model(tokens, labels)
            loss.backward()
        if update is not None:
            update.step()

    try:
        # Without a warm-up: cuBLAS takes its workspaces within the measurement, as planned.
        return measure_peak_memory(everything, device=where, warmup=0)
    finally:
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def compare(
    config: DecoderConfig, lengths: list[int], *, limit: int | str | None = None, **options: Any
) -> pd.DataFrame:
    """Predicted beside measured, one row a length.

    Args:
        lengths: tokens of a sequence.
        limit: for the plan's `fits`; nothing is limited.
        options: what `plan_memory` and `measure_step` share.

    Returns:
        seqlen, predicted_bytes, measured_bytes, error ((predicted - measured) / measured), when
        (the predicted moment), status and reason. Provenance in `.attrs["provenance"]`.
    """
    import pandas as pd

    from labsupport.profiling.provenance import provenance

    rows = []
    for seqlen in lengths:
        plan = plan_memory(config, seqlen=seqlen, limit=limit, **options)
        row: dict[str, Any] = {
            "seqlen": seqlen,
            "predicted_bytes": plan.peak_bytes,
            "when": plan.when,
            "status": "ok",
            "reason": "",
        }
        try:
            measured = measure_step(config, seqlen=seqlen, **options).peak_bytes
            row["measured_bytes"] = measured
            row["error"] = plan.peak_bytes / measured - 1
        except (torch.OutOfMemoryError, MemoryError) as error:
            row |= {"status": "out of memory", "reason": " ".join(str(error).split())}
        rows.append(row)
    columns = ["seqlen", "predicted_bytes", "measured_bytes", "error", "when", "status", "reason"]
    table = pd.DataFrame(rows).reindex(columns=columns)
    table.attrs["provenance"] = provenance(torch.device(options.get("device", "cpu")))
    return table
