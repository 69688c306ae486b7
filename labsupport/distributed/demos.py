"""Runs of notebook 3 on several processes: functions for `launch`, a small result of each rank.

They compute on the CPU wherever they run, so that they need no second device. Results are lists of
rows, plain dicts: pandas makes a table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.distributed.data_parallel import share_of, train_with_ddp, train_with_fsdp
from labsupport.distributed.process_group import (
    RankInfo,
    all_gather_object,
    cleanup_ddp,
    setup_ddp,
)
from labsupport.distributed.ring import last_ring_call, ring_attention, shard_sequence
from labsupport.distributed.ring.attention import SHARD_LAYOUTS
from labsupport.distributed.sequence_parallel import shard_batch, shard_model
from labsupport.profiling import measure_peak_memory
from labsupport.training import (
    ByteTokenizer,
    Decoder,
    DecoderConfig,
    TrainConfig,
    batches,
    source_documents,
)
from labsupport.training.data import IGNORED
from labsupport.training.tasks.recall import Stage, load_recall, recall_batches

Rows = list[dict[str, Any]]
Spans = list[tuple[float, float]]
_HEADS, _HEAD_DIM = 4, 64


@contextmanager
def _group() -> Iterator[RankInfo]:
    info = setup_ddp("gloo")
    try:
        yield info
    finally:
        cleanup_ddp()


def ring_on_ranks(*, timed: int = 4096, lengths: Sequence[int] = (1024, 2048)) -> dict[str, Rows]:
    """Demonstrate ring attention on the processes that `launch` started.

    Returns:
        losses: case, loss: of the `recall` decoder on a text of 2,048 bytes.
        spans (of `timed` tokens): layout, rank, what ("compute", "message"), start, end: seconds.
        memory: of `step_memory` (`lengths`).
    """
    with _group() as info:
        return {
            "losses": _losses(info),
            "spans": [row for layout in SHARD_LAYOUTS for row in _spans(info, layout, timed)],
            "memory": [_memory(info, length) for length in lengths],
        }


def step_memory(lengths: Sequence[int] = (1024, 2048)) -> Rows:
    """Measure the peak memory of a `tiny` decoder's step whose sequence the ranks share.

    Without a launcher it runs here, as one rank that holds the whole sequence. sent_bytes are of
    one layer.
    """
    with _group() as info:
        return [_memory(info, length) for length in lengths]


def train_on_ranks(
    *, seqlen: int = 256, micro_batches: int = 4, steps: int = 2, layers: int = 4
) -> Rows:
    """Take the same steps under DDP and FSDP, on the processes that `launch` started.

    Returns:
        a row for each case: rank; loss, all_reduces and all_reduced_bytes of the last step (the
        latter None for FSDP); parameters, gradients, optimizer (bytes stored after it).
    """
    with _group() as info:
        tokenizer = ByteTokenizer()
        documents = [tokenizer.encode(document.text) for document in source_documents(["random"])]
        number = micro_batches * info.world
        stream = batches(documents, seqlen, end_token=tokenizer.end_token, accumulation=number)
        settings = TrainConfig(steps=steps, gradient_accumulation_steps=micro_batches)
        cases: dict[str, Callable[..., Any]] = {
            "DDP, without no_sync": partial(train_with_ddp, sync_every=True),
            "DDP": train_with_ddp,
            "FSDP": train_with_fsdp,
        }
        rows = []
        for case, train in cases.items():
            torch.manual_seed(0)
            model = Decoder(DecoderConfig.preset("tiny", layers=layers))
            run = train(model, share_of(stream, info), settings, progress=False)
            row: dict[str, Any] = {"case": case, "rank": info.rank, "loss": run.history.losses[-1]}
            row["all_reduces"], row["all_reduced_bytes"] = (run.all_reduces or [(None, None)])[-1]
            rows.append(row | vars(run.memory))
        return rows


# --- ring attention, from several sides -----------------------------------------------------------


def _losses(info: RankInfo) -> Rows:
    """A trained model's loss on one device, on all of them, and after three mistakes."""
    model = load_recall(info.device)
    stage = Stage(1, 2048, 1, facts=30, questions=80)
    (batch,) = recall_batches([stage], others=0.0)(0)
    batch = {name: tensor.to(info.device) for name, tensor in batch.items()}
    zigzag, contiguous = (
        shard_batch(batch, info.rank, info.world, zigzag=cut) for cut in (True, False)
    )
    local = torch.arange(zigzag.tokens.shape[1], device=info.device)[None]
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


def _spans(info: RankInfo, layout: str, seqlen: int, repeats: int = 12) -> Rows:
    """Spans that PyTorch's profiler saw in a forward pass: of several, the fastest."""
    qkv = _draw(seqlen, info)
    own = [shard_sequence(x, info.rank, info.world, zigzag=layout == "zigzag") for x in qkv]
    options: dict[str, Any] = {"layout": layout, "causal": True, "kernel": "native"}
    passes = []
    for _ in range(repeats):  # the first one opens connections
        info.barrier()
        passes.append(_profiled(lambda: ring_attention(*own, check_ranks=False, **options)))
    # All ranks must take the same one: that in which the slowest of them was fastest.
    took = []
    for ranks in zip(*all_gather_object(passes), strict=True):
        times = [time for one in ranks for spans in one.values() for span in spans for time in span]
        took.append(max(times) - min(times))
    return [
        {"layout": layout, "rank": info.rank, "what": what, "start": start, "end": end}
        for what, spans in passes[took.index(min(took))].items()
        for start, end in spans
    ]


def _profiled(run: Callable[[], Any]) -> dict[str, Spans]:
    """The times of operators and of messages under way, in seconds."""
    with torch.profiler.profile(acc_events=True) as profiler:
        run()
    spans: dict[str, Spans] = {"compute": [], "message": []}
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        span = event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9
        if event.name() in ("gloo:send", "gloo:recv"):
            spans["message"].append(span)
        elif event.name().startswith("aten::"):
            spans["compute"].append(span)
    return {what: joined(some) for what, some in spans.items()}


def joined(spans: Iterable[tuple[float, float]], gap: float = 1e-3) -> Spans:
    """Join spans that overlap, or lie less than `gap` seconds apart."""
    done: Spans = []
    for start, end in sorted(spans):
        if done and start - done[-1][1] < gap:
            done[-1] = (done[-1][0], max(done[-1][1], end))
        else:
            done.append((start, end))
    return done


def _memory(info: RankInfo, seqlen: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.preset("tiny", layers=2)).to(info.device)
    tokens = torch.randint(257, (1, seqlen + 1), device=info.device)
    with shard_model(model, kernel="native") as sharded:
        shard = sharded.shard({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        use = measure_peak_memory(lambda: sharded(shard).backward(), device=info.device)
    report = last_ring_call()
    assert report is not None
    return {
        "rank": info.rank,
        "ranks": info.world,
        "seqlen": seqlen,
        "peak_memory_bytes": use.peak_bytes,
        "sent_bytes": report.traffic.kv_bytes + report.traffic.gradient_bytes,
    }


def _draw(seqlen: int, info: RankInfo) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 1, seqlen, _HEADS, _HEAD_DIM, generator=generator)
    return list(drawn.to(info.device).unbind(0))
