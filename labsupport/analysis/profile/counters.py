"""What NVIDIA's profilers say of kernels, and what it means.

`nsys stats` and `ncu` print tables as CSV, among lines of talk. Names of counters are those of
Nsight Compute; what a stall reason means follows its Kernel Profiling Guide, section "Metrics
Reference", warp stall reasons.

A kernel that is bound by arithmetic keeps the tensor cores busy; its warps then wait for those, or
for the results of those. A kernel that is bound by memory moves bytes near the measured copy
bandwidth; its warps wait for loads. If it does neither, too little is in flight at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labsupport.analysis.nsight_csv import read_csv

if TYPE_CHECKING:
    import pandas as pd

# To bytes and to nanoseconds.
_SCALE = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_SCALE |= {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_SCALE |= {"nsecond": 1.0, "usecond": 1e3, "msecond": 1e6, "second": 1e9}
_DURATION = "gpu__time_duration.sum"
_STALL = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio")
# What to ask ncu for beside its sections.
METRICS = (
    _DURATION,
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__m_l1tex2xbar_write_bytes.sum",
)
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis"),
    *("WarpStateStats", "Occupancy", "LaunchStats"),
)

STALLS = {
    "long_scoreboard": "for data from L2 or the main memory: more loads must be in flight, earlier",
    "short_scoreboard": "for shared memory, or for exponentials of the special-function unit",
    "wait": "a fixed time until the previous instruction's result: normal in dense arithmetic",
    "math_pipe_throttle": "for a busy arithmetic unit: the mark of a kernel bound by arithmetic",
    "gmma": "for the tensor cores to take or finish an asynchronous product: they have work",
    "barrier": "for other warps of the block: their work is uneven, or they meet often",
    "membar": "for memory to be in order for other threads",
    "mio_throttle": "for a free place in the queue of shared memory and special functions",
    "lg_throttle": "for a free place in the queue of loads and stores: make them wider, fewer",
    "tex_throttle": "for a free place in the queue of texture loads",
    "no_instruction": "for the next instruction: code larger than its cache, or just jumped",
    "branch_resolving": "for the target of a branch",
    "dispatch_stall": "for the dispatcher",
    "drain": "for stores to leave at its end",
    "imc_miss": "for a constant that was not in its cache",
    "sleeping": "because the code told it to sleep",
    "not_selected": "ready, but another warp was chosen: there are enough warps",
}
_NO_STALL = ("selected",)


@dataclass(frozen=True)
class Threshold:
    """How a reading is judged: at or above `good`, below `poor`, or between."""

    name: str
    unit: str
    good: float
    poor: float
    if_good: str
    if_between: str
    if_poor: str

    def verdict(self, value: float) -> str:
        """The sentence for a value."""
        if value >= self.good:
            return self.if_good
        return self.if_poor if value < self.poor else self.if_between


TENSOR = Threshold(
    *("tensor cores active", "% of the active cycles", 60, 30),
    "bound by arithmetic, as attention's forward pass should be",
    "the tensor cores wait for a part of the time: look at the stalls",
    "the tensor cores mostly wait, or are not used at all (float32 without TF32, small tiles)",
)
DRAM = Threshold(
    *("main memory's bandwidth", "% of the measured copy", 70, 30),
    "bound by the main memory: only moving fewer bytes helps",
    "the main memory matters, but does not bound it alone",
    "the main memory is not what it waits for",
)
OCCUPANCY = Threshold(
    *("occupancy", "% of the warps that fit", 50, 15),
    "enough warps to hide waiting behind others",
    "few warps, as usual for tiles that fill registers and shared memory; fine while the "
    "tensor cores are busy",
    "very few warps: nothing runs while they wait, unless loads are asynchronous",
)
THRESHOLDS = (TENSOR, DRAM, OCCUPANCY)


@dataclass(frozen=True)
class Counters:
    """One kernel's readings; None where the profiler gave none.

    l2_to_sm_bytes is what crossed between the L2 cache and the multiprocessors; l2_bytes counts
    the main memory's side of the cache too. stalls: warps that waited, for each instruction issued,
    by reason, the largest first.
    """

    kernel: str
    ms: float | None = None
    tensor_percent: float | None = None
    occupancy_percent: float | None = None
    dram_bytes: float | None = None
    l2_bytes: float | None = None
    l2_to_sm_bytes: float | None = None
    registers: float | None = None
    stalls: dict[str, float] = field(default_factory=dict)

    @property
    def dram_gb_s(self) -> float | None:
        """Bytes of the main memory over the kernel's time, in 10^9 a second."""
        if self.dram_bytes is None or not self.ms:
            return None
        return self.dram_bytes / self.ms / 1e6

    def meaning(self, copy_gb_s: float | None = None) -> list[str]:
        """A sentence for each reading that there is."""
        found = []
        if self.tensor_percent is not None:
            found.append(
                f"Tensor cores active in {self.tensor_percent:.0f}% of the cycles: "
                f"{TENSOR.verdict(self.tensor_percent)}."
            )
        if self.dram_bytes is not None and self.dram_gb_s is not None:
            text = f"Main memory: {self.dram_bytes / 1e6:,.1f} MB at {self.dram_gb_s:,.0f} GB/s"
            if copy_gb_s:
                share = 100 * self.dram_gb_s / copy_gb_s
                text += f", {share:.0f}% of the measured copy: {DRAM.verdict(share)}"
            found.append(f"{text}.")
        if self.l2_to_sm_bytes is not None:
            text = f"Between L2 and the multiprocessors: {self.l2_to_sm_bytes / 1e6:,.1f} MB"
            if self.dram_bytes:
                times = self.l2_to_sm_bytes / self.dram_bytes
                text += (
                    f", {times:.1f} times the main memory's: tiles of K and V are read again for "
                    "each block of queries, and L2 serves them"
                    if times > 1.5
                    else f", {times:.1f} times the main memory's: L2 saves little"
                )
            found.append(f"{text}.")
        if self.stalls:
            total = sum(self.stalls.values())
            first = [
                f"{share / total:.0%} {name} ({STALLS.get(name, 'see the profiling guide')})"
                for name, share in list(self.stalls.items())[:3]
                if total
            ]
            found.append(f"Of the time that warps wait: {'; '.join(first)}.")
        if self.occupancy_percent is not None:
            found.append(
                f"Occupancy {self.occupancy_percent:.0f}%: "
                f"{OCCUPANCY.verdict(self.occupancy_percent)}."
            )
        return found


def nsys_table(text: str) -> pd.DataFrame:
    """What `nsys stats --format csv` says of kernels or calls, the longest first.

    Returns:
        name, calls, total_ms, median_ms, share (of the table's total). Empty if there is no table.
    """
    import pandas as pd

    rows = [
        {
            "name": row.get("Name") or row.get("Operation") or "",
            "calls": int(_number(row.get("Instances") or row.get("Num Calls") or row["Count"])),
            "total_ms": _number(row["Total Time (ns)"]) / 1e6,
            "median_ms": _number(row.get("Med (ns)") or row.get("Avg (ns)") or "nan") / 1e6,
            "share": _number(row.get("Time (%)") or row.get("Time(%)") or "nan") / 100,
        }
        for row in read_csv(text, "Total Time (ns)")
    ]
    table = pd.DataFrame(rows, columns=["name", "calls", "total_ms", "median_ms", "share"])
    return table.sort_values("total_ms", ascending=False, ignore_index=True)


def ncu_counters(text: str) -> list[Counters]:
    """What `ncu --csv` says of each kernel, the longest first.

    Both of its layouts are read: a column for each metric with a line of units below the header
    (`--page raw`), and a line for each metric (`--page details`).
    """
    rows = read_csv(text, "Kernel Name")
    found = _from_lines(rows) if rows and "Metric Name" in rows[0] else _from_columns(rows)
    return sorted(found, key=lambda one: -(one.ms or 0))


def _from_columns(rows: list[dict[str, str]]) -> list[Counters]:
    if not rows:
        return []
    units = rows[0] if not rows[0].get("ID") else {}
    return [
        _counters(
            row["Kernel Name"],
            {name: _scaled(value, units.get(name, "")) for name, value in row.items() if value},
        )
        for row in (rows[1:] if units else rows)
    ]


def _from_lines(rows: list[dict[str, str]]) -> list[Counters]:
    kernels: dict[str, tuple[str, dict[str, float | None]]] = {}
    for row in rows:
        _, values = kernels.setdefault(row["ID"], (row["Kernel Name"], {}))
        values[row["Metric Name"]] = _scaled(row["Metric Value"], row["Metric Unit"])
    return [_counters(name, values) for name, values in kernels.values()]


def _counters(kernel: str, values: dict[str, float | None]) -> Counters:
    read = {name: value for name, value in values.items() if value is not None}
    # Its name differs between architectures; kinds of products that a kernel does not use read 0.
    tensor = [
        value
        for name, value in read.items()
        if name.startswith(("sm__pipe_tensor", "sm__inst_executed_pipe_tensor"))
        and name.endswith("pct_of_peak_sustained_active")
    ]
    begin, end = _STALL
    stalls = {
        name.removeprefix(begin).removesuffix(end): value
        for name, value in read.items()
        if name.startswith(begin) and name.endswith(end) and value > 0
    }
    duration = read.get(_DURATION)
    return Counters(
        kernel=kernel,
        ms=None if duration is None else duration / 1e6,
        tensor_percent=max(tensor, default=None),
        occupancy_percent=read.get("sm__warps_active.avg.pct_of_peak_sustained_active"),
        dram_bytes=_sum(read, "dram__bytes_read.sum", "dram__bytes_write.sum"),
        l2_bytes=read.get("lts__t_bytes.sum"),
        l2_to_sm_bytes=_sum(
            read, "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
        ),
        registers=read.get("launch__registers_per_thread"),
        stalls=dict(
            sorted(
                ((name, value) for name, value in stalls.items() if name not in _NO_STALL),
                key=lambda item: -item[1],
            )
        ),
    )


def _sum(values: dict[str, float], *names: str) -> float | None:
    there = [values[name] for name in names if name in values]
    return sum(there) if there else None


def _scaled(text: str, unit: str) -> float | None:
    """A value in base units (bytes, nanoseconds); None for what is no number."""
    try:
        return _number(text) * _SCALE.get(unit.strip(), 1.0)
    except ValueError:
        return None


def _number(text: str) -> float:
    return float(text.replace(",", ""))
