"""A device as the predictor sees it: its ceilings, and how many tiles it computes at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass

from labsupport.profiling.hardware import find_spec, read_specs
from labsupport.profiling.runs import list_runs, load_run, runs_dir

CPU_CACHE_MIB = 32.0  # of a CPU whose run does not say


@dataclass(frozen=True)
class Device:
    """Ceilings and size of a device.

    name: as the driver or the operating system reports it, or the row's name in hardware.csv.
    kind: "cuda" or "cpu".
    units: multiprocessors, or threads that compute.
    copy_gb_s: bytes read plus written a second, in 10^9.
    matmul_tflops: by dtype name, in 10^12 FLOPs a second.
    memory_gib: what it holds.
    cache_mib: the last cache that all units share.
    compute_capability: of a GPU, as (major, minor).
    specified: True where the rates come from a specification and not from a measurement.
    """

    name: str
    kind: str
    units: int
    copy_gb_s: float
    matmul_tflops: dict[str, float]
    memory_gib: float
    cache_mib: float = 0.0
    compute_capability: tuple[int, ...] = (0, 0)
    specified: bool = False


def device_of_run(run: str) -> Device:
    """The device that a recorded run was made on, with the ceilings measured there.

    Where the run's own provenance has no ceilings, they are the highest that other runs recorded on
    a device of the same name.

    Raises:
        FileNotFoundError: no such run.
        ValueError: no run on this device recorded its ceilings.
    """
    about = load_run(run).attrs["provenance"]
    name, spec = about["device"], find_spec(about["device"])
    units = about.get("units", spec.sms if spec else None)
    measured = [about]
    if "matmul_tflops" not in about:
        paths = (runs_dir() / run / "provenance.json" for run in list_runs())
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        measured = [run for run in runs if run.get("device") == name and "matmul_tflops" in run]
    if units is None or not measured:
        raise ValueError(f"no recorded run says what {name} reaches at most (measured_ceilings)")
    rates: dict[str, float] = {}
    for ceilings in measured:
        for dtype, rate in ceilings["matmul_tflops"].items():
            rates[dtype] = max(rate, rates.get(dtype, 0.0))
    return Device(
        name=name,
        kind=about["device_kind"],
        units=units,
        copy_gb_s=max(ceilings["copy_gb_s"] for ceilings in measured),
        matmul_tflops=rates,
        memory_gib=about["device_memory_gib"],
        cache_mib=spec.l2_mib if spec else about.get("cache_mib", CPU_CACHE_MIB),
        compute_capability=_capability(about.get("compute_capability") or "0.0"),
    )


def device_from_specification(name: str, like: Device) -> Device:
    """A GPU that need not be here, from its row of data/hardware.csv.

    No device reaches its specification. This one is taken to reach the same share of it as `like`,
    a measured GPU of the table, reaches of its specification.

    Raises:
        ValueError: a name that is not in the table, or a `like` that is not.
    """
    known = {spec.name: spec for spec in read_specs()}
    spec, measured = known.get(name) or find_spec(name), find_spec(like.name)
    if spec is None:
        raise ValueError(f"{name!r} is not in data/hardware.csv; there are: {', '.join(known)}")
    if measured is None:
        raise ValueError(f"{like.name!r} is not in data/hardware.csv: nothing to compare it with")
    rates = {}
    for dtype, rate in like.matmul_tflops.items():
        peak, peak_there = spec.peak_tflops(dtype), measured.peak_tflops(dtype)
        if peak and peak_there:
            rates[dtype] = rate * peak / peak_there
    return Device(
        name=spec.name,
        kind="cuda",
        units=spec.sms,
        copy_gb_s=like.copy_gb_s * spec.bandwidth_gb_s / measured.bandwidth_gb_s,
        matmul_tflops=rates,
        memory_gib=spec.memory_gib,
        cache_mib=spec.l2_mib,
        compute_capability=_capability(spec.compute_capability),
        specified=True,
    )


def _capability(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
