"""A fresh process that times one case in turns with a reference: the unit of a baseline.

    T R T R T R ...        T: the case          R: a fixed number of products of one square matrix

Three kinds of noise, and what is done about each:

* Where a program's memory lies is drawn anew for each process and stays until its end. A process
  that is timed for longer knows its own luck more exactly, and nothing else: what is repeated is
  the process (Kalibera and Jones, "Rigorous Benchmarking in Reasonable Time", 2013).
* Clocks and neighbours slow the whole machine. Case and reference meet that alike, so it is their
  ratio that is kept. The reference computes, as attention mostly does; a copy would meet others'
  use of the memory, and attention meets little of it.
* Another program on the same core is no property of ours. On a CPU the clock is the thread's own
  CPU time, and there is one thread: of several, those that still run wait for the one that does
  not, and the wait counts. So a CPU's baseline is about the kernel's work, not about how well it is
  shared out among cores. On a GPU the clock is the GPU's, and the call is replayed from a CUDA
  graph where it can be recorded as one: launching a short call from Python takes longer than its
  kernels, and varied by a third from process to process (H200, 2 x 4,096 x 8 x 64, causal).

From process to process the time of a call of 46 ms varied by 1.6% (standard deviation) and its
ratio to the reference by 0.4%; of one of 3 ms by 2.2% and 0.9% (data/runs/noise-cpu). While others
used the same cores: 3.3% and 0.7%, 8.5% and 3.7% (noise-cpu-busy).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from labsupport.paths import project_root
from labsupport.profiling.cases import Case

SECONDS = 1.0  # for the pairs of one process; importing PyTorch takes longer
FEWEST_PAIRS, MOST_PAIRS = 11, 41


@dataclass(frozen=True)
class Reference:
    """`products` times A @ A for a `size` x `size` matrix A of the case's dtype."""

    size: int
    products: int


@dataclass(frozen=True)
class Job:
    """What one process measures.

    extra: for trials of the rule, the part of the call's queries that it computes twice (0: none).
    """

    case: Case
    device: str
    reference: Reference
    pairs: int
    extra: float = 0.0


@dataclass(frozen=True)
class Pairs:
    """The times of one process in ms: of the case, and of the reference right after it."""

    case_ms: tuple[float, ...]
    reference_ms: tuple[float, ...]

    @property
    def log_ratio(self) -> float:
        """Natural log of the median of the pairs' ratios."""
        ratios = sorted(
            math.log(t / r) for t, r in zip(self.case_ms, self.reference_ms, strict=True)
        )
        middle = len(ratios) // 2
        return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2


def plan(case: Case, device: str | None = None) -> Job:
    """Choose a reference of like duration, and how many pairs a process takes.

    Raises: what the case's backend raises where it cannot run it.
    """
    from labsupport.profiling.graphs import captured
    from labsupport.profiling.timing import measure_time, resolve_device

    where = resolve_device(device)

    def fastest(call: Callable[[], Any]) -> float:
        return measure_time(call, device=where, min_repeats=3, max_seconds=0.3).min

    with _threads_for(where):
        case_ms = fastest(captured(call_of(case, where), where)[0])
        size = 8192 if where.type == "cuda" else 1024
        # From 256 on, a product is more arithmetic than launch; several make up the rest.
        while (one := fastest(reference_call(case, Reference(size, 1), where))) > case_ms:
            if size == 256:
                break
            size //= 2
    reference = Reference(size, max(1, round(case_ms / one)))
    pairs = round(SECONDS * 1e3 / (case_ms + reference.products * one))
    return Job(case, str(where), reference, min(MOST_PAIRS, max(FEWEST_PAIRS, pairs)))


def in_fresh_process(job: Job, *, timeout: float = 600) -> Pairs:
    """Measure the job in a new Python process.

    Raises:
        RuntimeError: the process failed; says its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(asdict(job))],
        cwd=project_root(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"a process that measured {job.case.backend} failed: {last}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Pairs(tuple(answer["case_ms"]), tuple(answer["reference_ms"]))


def measure(job: Job) -> Pairs:
    """Measure the job in this process."""
    from labsupport.profiling.graphs import captured
    from labsupport.profiling.timing import measure_interleaved, resolve_device

    where = resolve_device(job.device)
    case = call_of(job.case, where, job.extra)
    reference = reference_call(job.case, job.reference, where)
    with _threads_for(where):
        if where.type != "cuda":
            return _in_cpu_time(case, reference, job.pairs)
        timings = measure_interleaved(
            {"case": captured(case, where)[0], "reference": captured(reference, where)[0]},
            device=where,
            min_repeats=job.pairs,
            max_repeats=job.pairs,
            max_seconds=math.inf,
        )
    return Pairs(timings["case"].samples, timings["reference"].samples)


def _in_cpu_time(case: Callable[[], Any], reference: Callable[[], Any], pairs: int) -> Pairs:
    for _ in range(2):
        case()
        reference()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for call, samples in zip((case, reference), times, strict=True):
            start = time.thread_time()
            call()
            samples.append((time.thread_time() - start) * 1e3)
    return Pairs(tuple(times[0]), tuple(times[1]))


@contextmanager
def _threads_for(device: Any) -> Iterator[None]:
    """One thread on a CPU, for as long as the block lasts."""
    import torch

    before = torch.get_num_threads()
    if device.type != "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def call_of(case: Case, device: Any, extra: float = 0.0) -> Callable[[], Any]:
    """The case as a function without arguments; it computes `extra` of its queries twice."""
    import torch

    from labsupport.attention.backends import attention
    from labsupport.profiling.benchmark import make_inputs

    q, k, v, gradient = make_inputs(case, device, seed=0)
    backward = case.direction == "forward+backward"

    def once(rows: slice) -> Any:
        with torch.set_grad_enabled(backward):
            options: dict[str, Any] = {"causal": case.causal, "backend": case.backend}
            out: Any = attention(q[:, rows], k, v, check_layout=False, **options)
            return torch.autograd.grad(out, (q, k, v), gradient[:, rows]) if backward else out

    if not extra:
        return lambda: once(slice(None))
    again = slice(case.seqlen - round(extra * case.seqlen), None)
    return lambda: (once(slice(None)), once(again))


def reference_call(case: Case, reference: Reference, device: Any) -> Callable[[], Any]:
    """The reference as a function without arguments."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(reference.size, reference.size, generator=generator)
    a = a.to(device, getattr(torch, case.dtype))

    def products() -> None:
        for _ in range(reference.products):
            a @ a

    return products


def _main(text: str) -> None:
    given = json.loads(text)
    case, reference = Case(**given.pop("case")), Reference(**given.pop("reference"))
    print(json.dumps(asdict(measure(Job(case=case, reference=reference, **given)))))


if __name__ == "__main__":
    _main(sys.argv[1])
