"""Ring attention, timed: beside one device, PyTorch's own kernels and its context parallelism.

How long a step of all ranks takes is how long the slowest takes: they begin together, and each
takes the median of several repeats. The theoretical optimum is W times what one device needs for a
shard of the same length by the same kernel: under a causal mask, W times the tokens are W^2 times
the work, on W devices. `efficiency` is that optimum over the measured time.

`without_messages_ms` is the same ring when nothing is sent (the result is nonsense then): what is
between it and `median_ms` is communication that did not hide behind the compute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.ring import kernels
from labsupport.distributed.ring_tools import cases
from labsupport.distributed.ring_tools.cases import CONTEXT_PARALLEL, Case
from labsupport.distributed.ring_tools.cluster import elapsed
from labsupport.distributed.ring_tools.lab import Lab, Row
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import check_run_name, list_runs
from labsupport.profiling.timing import format_ms
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = [
    *("world", "layout", "implementation", "seqlen_per_rank", "heads", "kv_heads", "head_dim"),
    *("dtype", "direction", "status", "reason"),
    *("median_ms", "q1_ms", "q3_ms", "repeats", "iterations_per_s", "tflops"),
    *("single_ms", "efficiency", "of_native", "without_messages_ms"),
    *("peak_memory_bytes", "single_peak_memory_bytes", "sent_bytes"),
]
ON_GPU = (
    *("native", "cudnn", "flash_triton"),
    *("context_parallel[cudnn]", "context_parallel[flash]", "fa4"),
)
ON_CPU = ("native", "flash_torch")


def measure_ring(
    *,
    seqlens: Sequence[int] = (8192, 32768),
    heads: int = 32,
    kv_heads: Sequence[int] = (8, 32),
    head_dim: int = 128,
    dtype: str | None = None,
    implementations: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    directions: Sequence[str] = ("forward", "forward+backward"),
    max_seconds_per_case: float = 2.0,
    limit: float | None = None,
    rows_file: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> pd.DataFrame | None:
    """Time causal ring attention; all ranks of the default process group call it alike.

    Args:
        seqlens: tokens of each rank's shard.
        heads, kv_heads, head_dim: of the tensors; batch 1.
        dtype: "bfloat16", "float16", "float32"; None: bfloat16 on GPUs, float32 on CPUs.
        implementations: the ring's kernels and "context_parallel[flash|cudnn|efficient]"; None: all
            that may run here.
        layouts: "contiguous", "zigzag"; None: zigzag, and contiguous for the first implementation.
        directions: "forward", "forward+backward".
        max_seconds_per_case: for the repeats of one case; three are made in any case.
        limit: seconds for everything: what has not begun by then is skipped.
        rows_file: a CSV file that holds the rows so far, should the run not reach its end.
        say: is given a line for each row on rank 0.

    Returns:
        on rank 0 the table, with provenance: one row per case, its columns are `COLUMNS`. Times
        and memory are the slowest and the fullest rank's; single_ms and single_peak_memory_bytes
        one device's with the same kernel and a shard's length; sent_bytes the most that one rank
        sent; tflops of each device; of_native the time of "native" over the row's. `status` is
        "ok", "unsupported", "out of memory", "failed" or "skipped", with a reason. None elsewhere.

    Raises:
        ValueError: an unknown implementation, layout, direction or dtype.
    """
    import pandas as pd

    check_options(implementations, layouts, directions, dtype)
    place, began = Place.current(), time.monotonic()
    on_gpu = place.device.type == "cuda"
    names = tuple(implementations or (ON_GPU if on_gpu else ON_CPU))
    shapes = [(length, count) for length in seqlens for count in kv_heads]
    todo = _cases(names, layouts, directions, shapes, heads, head_dim, dtype or _dtype(on_gpu))
    lab = Lab(place, max_seconds_per_case)
    rows: list[Row] = []
    if place.rank == 0 and say is not None:
        say(HEADER)
    for case in todo:
        if limit is not None and elapsed(began) > limit:
            row = lab.about(case) | {"status": "skipped", "reason": f"{limit:g} s are over"}
        else:
            row = lab.row(case)
        row["of_native"] = _native_time(rows, row) / row.get("median_ms", math.nan)
        rows.append(row)
        if place.rank == 0:
            if say is not None:
                say(line(row))
            if rows_file is not None:
                pd.DataFrame(rows, columns=COLUMNS).to_csv(rows_file, index=False)
    if place.rank != 0:
        return None
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.attrs["provenance"] = provenance(
        place.device,
        world=place.world,
        context_parallel="allgather, balanced load: its defaults",
        nccl=_nccl() if on_gpu else None,
    )
    return table


def check_options(
    implementations: Sequence[str] | None,
    layouts: Sequence[str] | None,
    directions: Sequence[str],
    dtype: str | None,
) -> None:
    """Refuse what does not exist, before any process is started.

    Raises:
        ValueError: an unknown implementation, layout, direction or dtype.
    """
    known = {
        "implementations": ([kernel.name for kernel in kernels.KERNELS] + [*CONTEXT_PARALLEL]),
        "layouts": list(cases.RING_FUNCTIONS),
        "directions": ["forward", "forward+backward"],
        "dtype": ["bfloat16", "float16", "float32"],
    }
    given = implementations or (), layouts or (), directions, () if dtype is None else (dtype,)
    for (option, names), asked in zip(known.items(), given, strict=True):
        for name in asked:
            if name not in names:
                raise ValueError(f"--{option} {name}: there are {', '.join(names)}")


def check_files(save: str | None, overwrite: bool, rows: Path | None) -> None:
    """Refuse where nothing could be kept, before minutes are spent on measuring.

    Raises:
        ValueError: --save has no name for a run. FileExistsError: there is one of that name.
        FileNotFoundError: --rows is in a folder that does not exist.
    """
    if save is not None:
        check_run_name(save)
        if save in list_runs() and not overwrite:
            raise FileExistsError(f"there is a run {save}: choose another --save, or --overwrite")
    if rows is not None and not rows.absolute().parent.is_dir():
        raise FileNotFoundError(f"--rows {rows}: there is no folder {rows.absolute().parent}")


def _dtype(on_gpu: bool) -> str:
    return "bfloat16" if on_gpu else "float32"


def _cases(
    names: Sequence[str],
    layouts: Sequence[str] | None,
    directions: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    heads: int,
    head_dim: int,
    dtype: str,
) -> Iterator[Case]:
    """Those that matter most first: a run may be cut short."""
    wanted = [(name, layout) for name in names for layout in layouts or ("zigzag",)]
    if layouts is None:
        own = [name for name in names if name not in CONTEXT_PARALLEL]
        wanted += [(name, "contiguous") for name in own[:1]]
    found = [
        Case(layout, name, length, heads, count, head_dim, dtype, direction)
        for name, layout in wanted
        for length, count in shapes
        for direction in directions
        if name not in CONTEXT_PARALLEL or layout == "zigzag"
    ]
    # What may take minutes to compile, or hang where it does not work, comes last.
    order = {"fa4": 1} | dict.fromkeys(CONTEXT_PARALLEL, 2)
    return iter(sorted(found, key=lambda case: order.get(case.implementation, 0)))


def _nccl() -> dict[str, str]:
    """Its version, and what the environment tells it."""
    telling = ("NCCL_", "TORCH_NCCL", "CUDA_DEVICE_MAX_CONNECTIONS")
    told = {name: text for name, text in os.environ.items() if name.startswith(telling)}
    return {"version": ".".join(map(str, torch.cuda.nccl.version()))} | told


def _native_time(rows: Sequence[Row], row: Row) -> float:
    same = ("layout", "seqlen_per_rank", "heads", "kv_heads", "head_dim", "dtype", "direction")
    for other in [*rows, row]:
        if other["implementation"] == "native" and all(other[x] == row[x] for x in same):
            return other.get("median_ms", math.nan)
    return math.nan


# --- what is printed ------------------------------------------------------------------------------

HEADER = (
    f"{'layout':10} {'implementation':24} {'tokens':>6} {'heads':>6} {'pass':5} {'ms':>7} "
    f"{'silent':>7} {'1 device':>8} {'of best':>7} {'native':>6} {'TFLOP/s':>7} {'memory':>9}"
)


def line(row: Row) -> str:
    """A row as a line under `HEADER`.

    silent: without messages; of best: efficiency; native: its time over this one's.
    """
    passes = "f+b" if "backward" in row["direction"] else "f"
    start = (
        f"{row['layout']:10} {row['implementation']:24} {row['seqlen_per_rank']:6} "
        f"{row['heads']}/{row['kv_heads']:<3} {passes:5}"
    )
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['reason'][:160]}"

    def number(name: str, form: str) -> str:
        value = row.get(name, math.nan)
        return "-" if math.isnan(value) else format(value, form)

    def ms(name: str) -> str:
        value = row.get(name, math.nan)
        return "-" if math.isnan(value) else format_ms(value)

    return (
        f"{start} {ms('median_ms'):>7} {ms('without_messages_ms'):>7} {ms('single_ms'):>8} "
        f"{number('efficiency', '.0%'):>7} {number('of_native', '.2f'):>6} "
        f"{number('tflops', '.3g'):>7} {format_bytes(row['peak_memory_bytes']):>9}"
    )


def main(**options: Any) -> pd.DataFrame | None:
    """`measure_ring` with its lines printed: what `labsupport ring bench` runs in each process."""
    return measure_ring(**options, say=lambda text: print(text, flush=True))
