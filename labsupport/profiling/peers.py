"""One implementation beside the best others, shape by shape: how many times as fast is it?

python -m labsupport.profiling.peers                              flash_triton on this GPU
python -m labsupport.profiling.peers --head-dim 64 --save NAME    a part of the grid, kept

Each call works on the same number of tokens and the same hidden size: short sequences come in large
batches. All implementations are measured in one run, and only ratios of that run are printed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labsupport.attention.backends import available_backends
from labsupport.profiling.benchmark import run_grid
from labsupport.profiling.cases import Case, grid
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import resolve_device

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


def compare_with_peers(table: pd.DataFrame, ours: str) -> pd.DataFrame:
    """How many times as fast `ours` is as each other implementation, by shape.

    Args:
        table: what `run_grid` returned for `peer_cases`.
        ours: the backend in question.

    Returns:
        head_dim, causal, seqlen, pass ("forward" or "backward": forward+backward less forward), our
        TFLOP/s, and a column for each peer; NaN where one of the two did not run.
    """
    import pandas as pd

    rows = []
    for shape, group in table.groupby(SHAPE):
        ran = group[group.status == "ok"]
        times = ran.pivot(index="backend", columns="direction", values="median_ms")
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
    add("--max-seconds", type=float, default=0.3, help="for the repeats of one case")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    here = {status.name for status in available_backends(device=device) if status.runs}
    cases = peer_cases(
        [options.ours, *(peer for peer in options.peers if peer in here and peer != options.ours)],
        options.seqlen,
        head_dims=options.head_dim,
        tokens=options.tokens,
        hidden=options.hidden,
        dtype=options.dtype,
    )
    table = run_grid(cases, device=device, measure_error=False, max_seconds=options.max_seconds)
    ratios = compare_with_peers(table, options.ours)
    print(f"{table.attrs['provenance']['device']}: times as fast as the others, {options.ours}")
    print(ratios.round(2).to_string(index=False))
    print(geometric_means(ratios).round(2).to_string(index=False))
    save_if_asked(table, options)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ints(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


if __name__ == "__main__":
    main()
