"""The most that a device can do: by its specification, and by measurement.

`data/hardware.csv` holds the specified figures, each row with its source; rates are dense, those of
tensor cores with accumulation in float32. An empty cell means that the hardware cannot do it or
that no source gives the figure; the row's notes say which. Specified peaks are never reached: a
kernel is judged against `measured_ceilings`, of a large copy and a large matrix product.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from labsupport.paths import data_dir
from labsupport.profiling.health import warn_if_busy
from labsupport.profiling.timing import measure_time, now, resolve_device
from labsupport.profiling.units import format_bytes, format_rate

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 2  # of each ceiling's measurement, in turns


@dataclass(frozen=True)
class HardwareSpec:
    """One row of data/hardware.csv.  Rates in TFLOP/s, dense; None where no figure applies."""

    name: str
    driver_names: str  # regular expression over the names that the driver reports
    compute_capability: str
    sms: int
    memory_gib: float
    bandwidth_gb_s: float
    fp32_tflops: float | None
    tf32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    shared_kib_per_sm: float
    l2_mib: float
    notes: str
    source: str
    url: str

    def peak_tflops(self, dtype: str) -> float | None:
        """The specified rate for 'float32', 'tf32', 'float16' or 'bfloat16'."""
        columns = {"float32": "fp32", "tf32": "tf32", "float16": "fp16", "bfloat16": "bf16"}
        if dtype not in columns:
            raise ValueError(f"no peak rate for {dtype!r}; known: {', '.join(columns)}")
        return getattr(self, f"{columns[dtype]}_tflops")


@dataclass(frozen=True)
class DeviceInfo:
    """The device at hand.

    spec is None when the table does not know it; `note` then says so, and what still works.
    """

    kind: str  # "cpu" or "cuda"
    name: str
    memory_bytes: int
    compute_capability: str | None = None
    sms: int | None = None
    spec: HardwareSpec | None = None
    note: str = ""

    def __str__(self) -> str:
        more = f", compute capability {self.compute_capability}, {self.sms} multiprocessors"
        known = more if self.sms else ""
        return f"{self.name}, {format_bytes(self.memory_bytes)} of memory{known}"


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device.

    copy_gb_s: bytes read plus bytes written, per second, in 10^9.
    matmul_tflops: 2 n^3 / time by dtype name, in 10^12; 'tf32' is float32 on tensor cores.
    """

    device: str
    copy_gb_s: float
    matmul_tflops: dict[str, float]

    def __str__(self) -> str:
        rates = {name: format_rate(1e12 * x, "FLOP/s") for name, x in self.matmul_tflops.items()}
        matmul = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        return f"{self.device}: copy {format_rate(1e9 * self.copy_gb_s, 'B/s')}; matmul {matmul}"


@functools.cache
def read_specs() -> tuple[HardwareSpec, ...]:
    """The rows of data/hardware.csv.

    Raises:
        ValueError: a row without a figure that only some may lack.
    """
    kinds = {"int": int, "float": float, "float | None": lambda text: float(text) if text else None}
    kind_of: dict[str, Any] = {
        column.name: kinds.get(str(column.type), str) for column in fields(HardwareSpec)
    }
    with (data_dir() / "hardware.csv").open(newline="", encoding="utf-8") as file:
        return tuple(
            HardwareSpec(**{name: kind(row[name].strip()) for name, kind in kind_of.items()})
            for row in csv.DictReader(file)
        )


def hardware_table() -> pd.DataFrame:
    """The table of specifications as a DataFrame, one row per GPU, missing figures as NaN.

    >>> hardware_table().set_index("name").bandwidth_gb_s["H200"]
    np.float64(4800.0)
    """
    import pandas as pd

    table = pd.DataFrame([vars(spec) for spec in read_specs()])
    return table.drop(columns="driver_names")


def find_spec(driver_name: str) -> HardwareSpec | None:
    """The row for a device name as the driver reports it ('NVIDIA H100 PCIe'), or None.

    The whole name must match: an 'RTX 4090 Laptop GPU' is not an 'RTX 4090', nor is one slice of a
    partitioned GPU the whole.
    """
    matching = (s for s in read_specs() if re.fullmatch(s.driver_names, driver_name.strip()))
    return next(matching, None)


def detect_device(device: torch.device | str | None = None) -> DeviceInfo:
    """Describe the device, with its row of the table if there is one.

    >>> detect_device("cpu").kind
    'cpu'
    """
    where = resolve_device(device)
    if where.type != "cuda":
        found = None
        with contextlib.suppress(OSError):
            found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
        name = found[1].strip() if found else platform.processor() or platform.machine()
        note = "CPUs are not in the table: use measured_ceilings('cpu')"
        return DeviceInfo("cpu", name, psutil.virtual_memory().total, note=note)
    properties = torch.cuda.get_device_properties(where)
    spec = find_spec(properties.name)
    unknown = f"unknown device: {properties.name!r} is not in data/hardware.csv; measure it instead"
    return DeviceInfo(
        "cuda",
        properties.name,
        properties.total_memory,
        f"{properties.major}.{properties.minor}",
        properties.multi_processor_count,
        spec,
        "" if spec else unknown,
    )


_known: dict[str, Ceilings] = {}  # by device


def measured_ceilings(device: torch.device | str | None = None) -> Ceilings:
    """Copy bandwidth and matrix-multiplication rates of the device: 2 to 3 s on two CPU cores.

    Results are cached for the life of the process, and raised when a later measurement beats them
    (`raise_beaten`): a ceiling that is beaten judges nothing.

    >>> measured_ceilings("cpu").copy_gb_s > 1
    True
    """
    where = str(resolve_device(device))
    if where not in _known:
        _known[where] = measure_ceilings(where)
    return _known[where]


def raise_beaten(device: torch.device | str, reached: Mapping[str, float]) -> str:
    """Raise the known ceilings of a device, in place, that a kernel has beaten.

    They are measured again first, since the machine was busy the last time, most likely.

    Args:
        reached: TFLOP/s by dtype name.

    Returns:
        a sentence for the reader, or "" if none was beaten.
    """
    known = _known.get(str(device))
    if known is None or all(
        rate <= known.matmul_tflops.get(n, rate) for n, rate in reached.items()
    ):
        return ""
    again, said = measure_ceilings(str(device)), []
    for name, before in known.matmul_tflops.items():
        rate = max(before, again.matmul_tflops[name], reached.get(name, 0.0))
        if reached.get(name, 0.0) > before:
            said.append(f"{name} to {format_rate(1e12 * rate, 'FLOP/s')}")
        known.matmul_tflops[name] = rate
    return f"A kernel was faster than the measured ceiling: raised for {', '.join(said)}."


def measure_ceilings(device: torch.device | str | None = None) -> Ceilings:
    """Measure the device's ceilings now: each is the fastest of several rounds.

    On a CPU copied tensors exceed the caches (256 MiB), on a GPU they have 1 GiB; matrices grow
    until one multiplication takes about 50 ms.
    """
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    dtypes = ["float32", "bfloat16", "float16"]
    if on_gpu:
        ampere = torch.cuda.get_device_capability(where) >= (8, 0)
        dtypes = ["float32", "tf32", "float16", "bfloat16"] if ampere else ["float32", "float16"]
    copied = 2**30 if on_gpu else 2**28
    fastest: dict[str, float] = dict.fromkeys(("copy", *dtypes), 0.0)
    with warn_if_busy():
        for name in [*fastest] * ROUNDS:
            if name == "copy":
                # Bytes that a copy reads and writes.
                source = torch.ones(copied, dtype=torch.uint8, device=where)
                call, amount = partial(torch.empty_like(source).copy_, source), 2.0 * copied
                del source
            else:
                call, amount = _product(name, where)
            timing = measure_time(call, device=where, warmup=1, min_repeats=3, max_seconds=0.1)
            fastest[name] = max(fastest[name], amount / timing.min / 1e9)
            del call  # and its tensors
    rates = {name: fastest[name] for name in dtypes}
    return Ceilings(detect_device(where).name, fastest["copy"] * 1e3, rates)


def _product(name: str, device: torch.device) -> tuple[Callable[[], Any], float]:
    """The largest square product that takes about 50 ms or less, and its FLOPs."""
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    size, largest = (2048, 16384) if device.type == "cuda" else (256, 2048)

    def call() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        try:
            a @ a
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    while True:
        a = torch.randn(size, size, device=device).to(dtype)
        call()
        took = []
        for _ in range(2):  # one may lose its core to another process
            start = now(device)
            call()
            took.append(now(device) - start)
        # Doubling n takes eight times as long.
        if size == largest or 8 * min(took) > 0.05:
            return call, 2.0 * size**3
        size *= 2
