"""Which ranks there are, how their devices are linked, and how fast messages travel."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.ring_tools.start import everybody, meet
from labsupport.profiling.timing import format_ms, now
from labsupport.profiling.units import format_bytes


def members(place: Place) -> list[str]:
    """One line a rank: host, process, device."""
    device = str(place.device)
    if place.device.type == "cuda":
        about = torch.cuda.get_device_properties(place.device)
        device += f", {about.name}, {format_bytes(about.total_memory)}"
    else:
        device += f", {torch.get_num_threads()} of {os.cpu_count()} cores"
    lines = everybody(f"{platform.node()}, process {os.getpid()}, {device}")
    return [f"rank {rank}: {line}" for rank, line in enumerate(lines)]


def links(place: Place) -> list[str]:
    """How each host's devices are linked, as far as it can be found out."""
    if place.device.type != "cuda":
        name = os.environ.get("GLOO_SOCKET_IFNAME", "")
        way = {"": "the network's interface", "lo": "lo, within this machine"}
        return [f"links: processes on CPUs; gloo's messages travel over {way.get(name, name)}"]
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    by_rank = everybody((platform.node(), _links_here() if first else []))
    hosts = [(host, lines) for host, lines in by_rank if lines]
    return [f"{host}: {line}" if hosts[1:] else line for host, lines in hosts for line in lines]


def _links_here() -> list[str]:
    lines = _by_nvidia_smi() or ["links: unknown (nvidia-smi topo -m says nothing here)"]
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    reach = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    lines.append(
        f"memory of another GPU can be reached directly: {reach} of {len(pairs)} directed pairs"
    )
    return lines


def _by_nvidia_smi() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return matrix_of_links(done.stdout)


def matrix_of_links(text: str) -> list[str]:
    """What `nvidia-smi topo -m` says about pairs of GPUs; [] where it cannot be read.

    >>> matrix_of_links("      GPU0  GPU1\\nGPU0   X    NV18\\nGPU1  NV18   X")
    ['links: NV18 (18 NVLinks) for 2 of 2 directed pairs']
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # its header is underlined
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]
    kinds = [kind for row in rows for kind in row[1 : 1 + len(rows)] if kind != "X"]
    found = []
    for kind in sorted(set(kinds)):
        by_nvlink = re.fullmatch(r"NV(\d+)", kind)
        what = f"{by_nvlink[1]} NVLinks" if by_nvlink else "PCIe or the host's memory"
        count = f"{kinds.count(kind)} of {len(kinds)} directed pairs"
        found.append(f"links: {kind} ({what}) for {count}")
    return found


# --- how fast -------------------------------------------------------------------------------------


def check_all_reduce(place: Place) -> str | None:
    """None if a sum over all ranks is right on this one, or else what it is."""
    given = torch.arange(1000, dtype=torch.float32, device=place.device) + place.rank
    dist.all_reduce(given)
    world = place.world
    wanted = torch.arange(1000, device=place.device) * world + world * (world - 1) // 2
    if torch.equal(given, wanted.float()):
        return None
    return f"a sum over all ranks is wrong: {given[0].item()} in place of {wanted[0].item()}"


def speeds(place: Place) -> Iterator[str]:
    """Lines: latency, bandwidth of an all-reduce and of a hop around the ring, by size."""
    small = _slowest(place, _hop(place, torch.zeros(2, device=place.device)), repeats=20)
    yield f"a hop of 8 bytes to the next rank: {1e6 * small:.0f} us"
    sizes = (2**20, 2**26, 2**28) if place.device.type == "cuda" else (2**16, 2**20, 2**23)
    for size in sizes:
        message = torch.zeros(size // 4, device=place.device)
        hop = _slowest(place, _hop(place, message))
        total = _slowest(place, lambda message=message: dist.all_reduce(message))
        # Each rank sends and receives 2 (W - 1) / W of the bytes: NCCL's "bus bandwidth".
        share = 2 * (place.world - 1) / place.world
        yield (
            f"{format_bytes(size)}: a hop {format_ms(1e3 * hop)} ms, {size / hop / 1e9:.1f} GB/s "
            f"each way; all-reduce {format_ms(1e3 * total)} ms, "
            f"{share * size / total / 1e9:.1f} GB/s"
        )


def _hop(place: Place, message: Tensor) -> Callable[[], None]:
    arriving = torch.empty_like(message)
    after, before = (place.rank + 1) % place.world, (place.rank - 1) % place.world

    def hop() -> None:
        operations = [
            dist.P2POp(dist.isend, message, after),
            dist.P2POp(dist.irecv, arriving, before),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return hop


def _slowest(place: Place, action: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the slowest rank; the median of several, each begun together."""
    samples = []
    for _ in range(repeats + 2):
        meet(place)
        start = now(place.device)
        action()
        samples.append(now(place.device) - start)
    return max(everybody(statistics.median(samples[2:])))


def elapsed(since: float) -> float:
    """Seconds since `time.monotonic()` was that, on the slowest rank: the same for all."""
    return max(everybody(time.monotonic() - since))
