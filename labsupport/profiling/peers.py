"""One implementation beside the best others, shape by shape: how many times as fast is it?

python -m labsupport.profiling.peers                              flash_triton on this GPU
python -m labsupport.profiling.peers --head-dim 64 --save NAME    a part of the grid, kept

Each call works on the same number of tokens and the same hidden size: short sequences come in large
batches. All implementations of a shape are measured in turns, and their ratios printed, which are
those of one run.

Two times are measured on a GPU. `median_ms` is what its kernels take: the call is recorded as a
CUDA graph, whose replay costs the CPU nothing. `call_ms` is the same call from Python, where the
GPU may have to wait for the next kernel's launch: with sequences of 512 tokens it does, whatever
the implementation. A model that is compiled or replayed meets the first, a short script the second.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention.backends import attention, available_backends
from labsupport.profiling.benchmark import make_inputs, refusal
from labsupport.profiling.cases import Case, grid
from labsupport.profiling.graphs import captured
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import measure_interleaved, resolve_device

if TYPE_CHECKING:
    import pandas as pd

PEERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "fa2", "fa4")
SHAPE = ["head_dim", "causal", "seqlen"]


def peer_cases(
    backends: Sequence[str],
    seqlens: Sequence[int],
    *,
    head_dims: Sequence[int] = (64, 128),
    tokens: int = 16_384,
    hidden: int = 2048,
    dtype: str = "bfloat16",
) -> list[Case]:
    """The grid: `tokens` per call, `hidden` = heads x head_dim, both masks, both directions."""
    cases: list[Case] = []
    for head_dim in head_dims:
        for seqlen in seqlens:
            cases += grid(
                backends,
                [seqlen],
                batch=[max(1, tokens // seqlen)],
                heads=[hidden // head_dim],
                head_dim=[head_dim],
                dtype=[dtype],
                causal=[False, True],
                direction=["forward", "forward+backward"],
            )
    return cases


COLUMNS = [
    *(field.name for field in fields(Case)),
    *("status", "reason", "in_graph", "median_ms", "q1_ms", "q3_ms", "repeats", "tflops"),
    "call_ms",
]


def measure_peers(
    cases: Iterable[Case],
    *,
    device: torch.device | str | None = None,
    max_seconds: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure each case; those that differ only in backend and direction are measured in turns.

    Args:
        cases: as `peer_cases` makes them.
        device: by default the current GPU if there is one, else the CPU.
        max_seconds: for the repeats of one case, once in a graph and once from Python.
        progress: show a tqdm bar.

    Returns:
        A row each, with provenance in `.attrs`: the fields of `Case`; status and reason as in
        `run_grid`; median_ms, q1_ms, q3_ms and repeats of the kernels, tflops at the median;
        in_graph, whether they could be recorded; call_ms, the median of calls from Python (on a CPU
        the same).
    """
    import pandas as pd
    from tqdm.auto import tqdm

    where, cases = resolve_device(device), list(cases)
    record = provenance(where, seed=seed, cases=len(cases))
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(cases), disable=not progress, unit="case", leave=False) as bar:
        for _, group in itertools.groupby(cases, key=lambda case: case.shape_key):
            found = _measure_shape(list(group), where, max_seconds, seed)
            rows += found
            bar.update(len(found))
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.attrs["provenance"] = record
    return table


def _measure_shape(
    cases: Sequence[Case], device: torch.device, max_seconds: float, seed: int
) -> list[dict[str, Any]]:
    rows = [asdict(case) | {"status": "ok", "reason": "", "in_graph": False} for case in cases]
    calls: dict[str, Callable[[], Any]] = {}
    replays: dict[str, Callable[[], Any]] = {}
    inputs = make_inputs(cases[0], device, seed)
    for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
        call = _call(case, *inputs)
        try:
            replays[str(number)], row["in_graph"] = captured(call, device)
            calls[str(number)] = call
        except Exception as problem:
            row |= refusal(problem)
    if calls:
        bounds: dict[str, Any] = {"warmup": 2, "min_repeats": 3, "min_seconds": 0.0}
        bounds["max_seconds"] = max_seconds * len(calls)
        timings = measure_interleaved(replays, device=device, **bounds)
        from_python = timings
        if device.type == "cuda":
            from_python = measure_interleaved(calls, device=device, **bounds)
        for name, timing in timings.items():
            row = rows[int(name)]
            row |= {f"{part}_ms": getattr(timing, part) for part in ("median", "q1", "q3")}
            row |= {"repeats": timing.repeats, "call_ms": from_python[name].median}
            row["tflops"] = cases[int(name)].flops() / timing.median / 1e9
    replays.clear()
    gc.collect()  # a graph keeps its memory as long as it lives
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _call(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> Callable[[], Any]:
    options: dict[str, Any] = {"causal": case.causal, "backend": case.backend}
    if case.direction == "forward":
        q, k, v = q.detach(), k.detach(), v.detach()
        return lambda: attention(q, k, v, check_layout=False, **options)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def both() -> Any:
        out = attention(q, k, v, check_layout=False, **options)
        return torch.autograd.grad(out, (q, k, v), gradient)

    return both


def compare_with_peers(
    table: pd.DataFrame, ours: str, *, column: str = "median_ms"
) -> pd.DataFrame:
    """How many times as fast `ours` is as each other implementation, by shape.

    Args:
        table: what `measure_peers` returned for `peer_cases`.
        ours: the backend in question.
        column: "median_ms", the kernels' time, or "call_ms", that of calls from Python.

    Returns:
        head_dim, causal, seqlen, pass ("forward" or "backward": forward+backward less forward), our
        TFLOP/s, and a column for each peer; NaN where one of the two did not run.
    """
    import pandas as pd

    rows = []
    for shape, group in table.groupby(SHAPE):
        ran = group[group.status == "ok"]
        times = ran.pivot(index="backend", columns="direction", values=column)
        times = times.reindex(columns=["forward", "forward+backward"])
        # The same for all implementations: from any forward row.
        flops = (ran.tflops * ran.median_ms * 1e9)[ran.direction == "forward"].mean()
        passes = {
            "forward": (times["forward"], flops),
            "backward": (times["forward+backward"] - times["forward"], 2.5 * flops),
        }
        for name, (taken, work) in passes.items():
            own = taken.get(ours, math.nan)
            row = dict(zip(SHAPE, shape, strict=True)) | {"pass": name}
            row["TFLOP/s"] = work / own / 1e9
            rows.append(row | {peer: t / own for peer, t in taken.items() if peer != ours})
    return pd.DataFrame(rows)


def geometric_means(ratios: pd.DataFrame) -> pd.DataFrame:
    """The mean ratio over all shapes, and the smallest one: a row for each pass and peer."""
    import numpy as np
    import pandas as pd

    rows = []
    for name, group in ratios.groupby("pass", sort=False):
        for peer in [
            column for column in ratios.columns if column not in (*SHAPE, "pass", "TFLOP/s")
        ]:
            values = group[peer].dropna().to_numpy()
            if len(values):
                mean = float(np.exp(np.log(values).mean()))
                rows.append({"pass": name, "peer": peer, "mean": mean, "smallest": values.min()})
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.profiling.peers", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--ours", default="flash_triton")
    add("--peers", type=_names, default=list(PEERS), help="those that run here are measured")
    add("--seqlen", type=_ints, default=[512, 1024, 2048, 4096, 8192, 16_384])
    add("--head-dim", type=_ints, default=[64, 128])
    add("--tokens", type=int, default=16_384, help="per call")
    add("--hidden", type=int, default=2048, help="heads times head_dim")
    add("--dtype", default="bfloat16")
    add("--device", help="cpu or cuda; default: the GPU if there is one")
    add("--max-seconds", type=float, default=0.1, help="for the repeats of one case, each time")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    backends = available_backends(device=device)
    for name in {options.ours, *options.peers} - {status.name for status in backends}:
        parser.error(f"there is no backend {name!r}")
    here = {status.name for status in backends if status.runs}
    cases = peer_cases(
        [options.ours, *(peer for peer in options.peers if peer in here and peer != options.ours)],
        options.seqlen,
        head_dims=options.head_dim,
        tokens=options.tokens,
        hidden=options.hidden,
        dtype=options.dtype,
    )
    table = measure_peers(cases, device=device, max_seconds=options.max_seconds)
    print(f"{table.attrs['provenance']['device']}: times as fast as the others, {options.ours}")
    print(compare_with_peers(table, options.ours).round(2).to_string(index=False))
    for column, what in (("median_ms", "kernels"), ("call_ms", "calls from Python")):
        print(f"Geometric means over all shapes, {what}:")
        means = geometric_means(compare_with_peers(table, options.ours, column=column))
        print(means.round(2).to_string(index=False))
    for line in _not_measured(table):
        print(line)
    save_if_asked(table, options)


def _not_measured(table: pd.DataFrame) -> list[str]:
    """A line for each reason why cases did not run, and for those that no graph could record."""
    others = table[table.status != "ok"].groupby(["backend", "status", "reason"], sort=False)
    lines = [f"{name}: {status}: {why} ({len(group)})" for (name, status, why), group in others]
    if table.in_graph.any():
        plain = table[(table.status == "ok") & ~table.in_graph.astype(bool)]
        lines += [
            f"{name}: no CUDA graph, called from Python ({len(group)})"
            for name, group in plain.groupby("backend", sort=False)
        ]
    return lines


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ints(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


if __name__ == "__main__":
    main()
