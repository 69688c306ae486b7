"""Ring attention for notebook 3: against one device, over time, and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention import oracle_attention
from labsupport.attention.rotary import apply_rotary_emb, rotary_angles
from labsupport.distributed.data_parallel import (
    Place,
    cleanup_ddp,
    setup_ddp,
)
from labsupport.distributed.ring import (
    gather_sequence,
    last_ring_call,
    positions_of,
    ring_flash_attn_func,
    shard_sequence,
    zigzag_ring_flash_attn_func,
)
from labsupport.distributed.sequence_parallel import shard_batch, shard_model
from labsupport.profiling import measure_peak_memory
from labsupport.training import (
    Decoder,
    DecoderConfig,
)
from labsupport.training.data import IGNORED
from labsupport.training.tasks.recall import Stage, load_recall, recall_batches

Rows = list[dict[str, Any]]
Spans = list[tuple[float, float]]
RINGS: dict[str, Callable[..., Any]] = {
    "contiguous": ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
}
_HEADS, _HEAD_DIM = 4, 64


def ring_on_ranks(
    *,
    seqlen: int = 512,
    timed: int = 4096,
    lengths: Sequence[int] = (1024, 2048, 4096),
) -> dict[str, Rows]:
    """Ring attention of the processes that `launch` started, looked at from several sides.

    Args:
        seqlen: of the sequence whose results are compared with one device's.
        timed: of the one whose spans of time are recorded.
        lengths: of those whose memory is measured.

    Returns:
        errors: case, tensor, max, rmse, relative (norms), against float64 on one device.
        losses: case, loss: of the `recall` decoder on a text of 2,048 bytes.
        spans: layout, rank, what ("compute", "message"), start, end: seconds, of one clock.
        memory: of `step_memory`.
    """
    place = setup_ddp("gloo")
    try:
        return {
            "errors": [row for layout in RINGS for row in _errors(place, layout, seqlen)],
            "losses": _losses(place),
            "spans": [row for layout in RINGS for row in _spans(place, layout, timed)],
            "memory": [_memory(place, length) for length in lengths],
        }
    finally:
        cleanup_ddp()


def step_memory(lengths: Sequence[int] = (1024, 2048, 4096)) -> Rows:
    """Peak memory of forward and backward of a `tiny` decoder whose sequence the ranks share.

    Without a launcher it runs here, as one rank that holds the whole sequence.

    Returns:
        rank, ranks (W), seqlen, peak_memory_bytes, and sent_bytes (of one layer).
    """
    place = setup_ddp("gloo")
    try:
        return [_memory(place, length) for length in lengths]
    finally:
        cleanup_ddp()


def _errors(place: Place, layout: str, seqlen: int) -> Rows:
    whole = _draw(seqlen, place, count=4)
    everywhere = torch.arange(seqlen, device=place.device)
    right = _with_gradients(whole, everywhere, _oracle, dtype=torch.float64)
    zigzag = layout == "zigzag"
    own = [shard_sequence(x, place.rank, place.world, zigzag=zigzag) for x in whole]
    where = positions_of(
        own[0].shape[1], place.rank, place.world, zigzag=zigzag, device=place.device
    )
    found = _with_gradients(own, where, partial(RINGS[layout], causal=True))
    rows = []
    for name, shard in found.items():
        wrong = gather_sequence(shard, zigzag=zigzag).double() - right[name]
        rows.append(
            {
                "case": layout,
                "tensor": name,
                "max": wrong.abs().max().item(),
                "rmse": wrong.square().mean().sqrt().item(),
                "relative": (wrong.norm() / right[name].norm()).item(),
            }
        )
    return rows


def _losses(place: Place) -> Rows:
    """A trained model's loss on one device, on all of them, and after three mistakes."""
    model = load_recall(place.device)
    stage = Stage(1, 2048, 1, facts=30, questions=80)
    (batch,) = recall_batches([stage], others=0.0)(0)
    batch = {name: tensor.to(place.device) for name, tensor in batch.items()}
    cut = partial(shard_batch, batch, place.rank, place.world)
    zigzag, contiguous = cut(zigzag=True), cut(zigzag=False)
    local = torch.arange(zigzag.tokens.shape[1], device=place.device)[None]
    late = torch.where(zigzag.labels != IGNORED, zigzag.tokens.roll(-1, 1), zigzag.labels)
    cases = {
        "contiguous": (False, contiguous),
        "zigzag": (True, zigzag),
        "zigzag shards, contiguous ring": (False, zigzag),
        "positions from 0 on each rank": (True, replace(zigzag, positions=local)),
        "labels shifted after the cut": (True, replace(zigzag, labels=late)),
    }
    with torch.no_grad():
        rows: Rows = [{"case": "one device", "loss": model(**batch).item()}]
        for case, (layout, shard) in cases.items():
            with shard_model(model, zigzag=layout) as sharded:
                loss = sharded(shard)
            dist.all_reduce(loss)
            rows.append({"case": case, "loss": loss.item()})
    return rows


def _with_gradients(
    tensors: Sequence[Tensor],
    positions: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Turned by RoPE, forward and backward: out, and the gradients before the turn."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
    cos, sin = (table.to(dtype) for table in rotary_angles(positions, _HEAD_DIM))
    out = attend(apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v)
    gradients = torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def _oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return oracle_attention(*heads_first, causal=True)[0].transpose(1, 2)


def _spans(place: Place, layout: str, seqlen: int, repeats: int = 6) -> Rows:
    """What PyTorch's profiler saw of a forward pass, of several the one that was done first."""
    own = [
        shard_sequence(x, place.rank, place.world, zigzag=layout == "zigzag")
        for x in _draw(seqlen, place)
    ]
    attend = partial(RINGS[layout], causal=True, check_ranks=False, kernel="native")
    passes = []
    for _ in range(repeats):  # the first one opens connections
        place.wait_for_all()
        passes.append(_profiled(lambda: attend(*own)))
    # All ranks must take the same one: that in which the slowest of them was fastest.
    every = [[span for spans in one.values() for span in spans] for one in passes]
    starts, ends = (
        torch.tensor(x, dtype=torch.float64) for x in zip(*map(_limits, every), strict=True)
    )
    dist.all_reduce(starts, dist.ReduceOp.MIN)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    best = passes[int((ends - starts).argmin())]
    return [
        {"layout": layout, "rank": place.rank, "what": what, "start": start, "end": end}
        for what, spans in best.items()
        for start, end in spans
    ]


def _profiled(run: Callable[[], Any]) -> dict[str, Spans]:
    """When operators computed, and when messages were under way, in seconds."""
    with torch.profiler.profile(acc_events=True) as profiler:
        run()
    found: dict[str, Spans] = {"compute": [], "message": []}
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        span = event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9
        if event.name() in ("gloo:send", "gloo:recv"):
            found["message"].append(span)
        elif event.name().startswith("aten::"):
            found["compute"].append(span)
    return {what: joined(spans) for what, spans in found.items()}


def _limits(spans: Spans) -> tuple[float, float]:
    return min(start for start, _ in spans), max(end for _, end in spans)


def joined(spans: Iterable[tuple[float, float]], gap: float = 1e-3) -> Spans:
    """Spans as few as possible: those that overlap, or less than `gap` seconds apart, are one.

    >>> joined([(0.0, 1.0), (3.0, 4.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    done: Spans = []
    for start, end in sorted(spans):
        if done and start - done[-1][1] < gap:
            done[-1] = (done[-1][0], max(done[-1][1], end))
        else:
            done.append((start, end))
    return done


def _memory(place: Place, seqlen: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.preset("tiny", layers=2)).to(place.device)
    tokens = torch.randint(257, (1, seqlen + 1), device=place.device)
    with shard_model(model, kernel="native") as sharded:
        shard = sharded.shard({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        use = measure_peak_memory(lambda: sharded(shard).backward(), device=place.device)
    report = last_ring_call()
    assert report is not None
    return {
        "rank": place.rank,
        "ranks": place.world,
        "seqlen": seqlen,
        "peak_memory_bytes": use.peak_bytes,
        "sent_bytes": report.traffic.kv_bytes + report.traffic.gradient_bytes,
    }


def _draw(seqlen: int, place: Place, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, 1, seqlen, _HEADS, _HEAD_DIM, generator=generator)
    return list(drawn.to(place.device).unbind(0))
