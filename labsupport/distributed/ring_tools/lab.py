"""One case of `ring bench` on one rank: all ranks do the same, and agree before they go on."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.registry import AttentionCall, BackendUnavailableError
from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.ring_tools import cases
from labsupport.distributed.ring_tools.cases import CONTEXT_PARALLEL, Case
from labsupport.distributed.ring_tools.start import agree, attempt, everybody, meet
from labsupport.distributed.ring_tools.trouble import advice
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.timing import Timing, now

Row = dict[str, Any]

FEWEST, MOST = 3, 20  # repeats


class Lab:
    """This rank's part in measuring.

    place: this rank. seconds: for the repeats of a case; three are made in any case.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self.singles: dict[Case, Row] = {}

    def about(self, case: Case) -> Row:
        """The columns that say what is measured."""
        return {"world": self.place.world} | asdict(case)

    def row(self, case: Case) -> Row:
        """One row; what fails on a rank fails on all, with a reason."""
        inputs: list[Tensor] = []
        try:
            found = self._row(case, inputs)
        finally:
            inputs.clear()
            gc.collect()
            if self.place.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.about(case) | {"status": "ok", "reason": ""} | found

    def _row(self, case: Case, inputs: list[Tensor]) -> Row:
        def prepare() -> None:
            inputs.extend(case.inputs(self.place))
            if case.kernel is not None:
                kernel, (q, k, v, _) = cases.kernel_named(case.kernel), inputs
                call = AttentionCall(q, k, v, causal=True, return_lse=True)
                reasons = kernel.reasons(call, False)
                if reasons:
                    raise BackendUnavailableError("; ".join(reasons), {})

        problem = agree(attempt(prepare))
        if problem is not None:
            return _failure(problem)
        found = self._single(case, inputs)
        if case.implementation in CONTEXT_PARALLEL:
            return found | self._in_context(case, inputs)
        silent = case.program(cases.rehearsed(case), inputs)
        problem = agree(attempt(lambda: self._try(silent)))
        if problem is not None:
            return found | _failure(problem)
        found["without_messages_ms"] = self._timed(silent, self.seconds / 2, warm=True)["ms"]
        return found | self._measured(case, case.program(cases.in_a_ring(case), inputs), sends=True)

    def _single(self, case: Case, inputs: list[Tensor]) -> Row:
        """One device's time and memory, each rank by itself: the middle rank's."""
        if case.kernel is None:
            return {}
        key = replace(case, layout="", implementation=case.kernel)
        if key not in self.singles:
            program = case.program(cases.on_one_device(case.kernel), inputs)
            self.singles[key] = {}
            if agree(attempt(lambda: self._try(program))) is None:
                measured = self._timed(program, self.seconds / 2)
                self.singles[key] = {
                    "single_ms": measured["middle_ms"],
                    "single_peak_memory_bytes": measured["peak"],
                }
        return dict(self.singles[key])

    def _in_context(self, case: Case, inputs: list[Tensor]) -> Row:
        found: Row = {}

        def run() -> None:
            with cases.context_parallel(case, self.place) as attend:
                found.update(self._measured(case, case.program(attend, inputs), sends=False))

        problem = agree(attempt(run))
        return found if problem is None else _failure(problem)

    def _measured(self, case: Case, program: Callable[[], Any], *, sends: bool) -> Row:
        measured: Row = {}
        problem = agree(attempt(lambda: measured.update(self._timed(program, self.seconds))))
        if problem is not None:
            return _failure(problem)
        timing = measured["timing"]
        seconds = timing.median / 1e3
        key = replace(case, layout="", implementation=case.kernel or "")
        single = self.singles.get(key, {}).get("single_ms", math.nan)
        return {
            "median_ms": timing.median,
            "q1_ms": timing.q1,
            "q3_ms": timing.q3,
            "repeats": timing.repeats,
            "iterations_per_s": 1 / seconds,
            "tflops": case.flops(self.place.world) / self.place.world / seconds / 1e12,
            "efficiency": self.place.world * single / timing.median,
            "peak_memory_bytes": measured["peak"],
            "sent_bytes": max(everybody(cases.sent_bytes())) if sends else math.nan,
        }

    def _try(self, program: Callable[[], Any]) -> None:
        """Compile, allocate, run: by this rank alone."""
        program()
        now(self.place.device)

    def _timed(self, program: Callable[[], Any], seconds: float, *, warm: bool = False) -> Row:
        """Repeats that all ranks begin together, and as many on each.

        The first run, which does not count, shows the memory; a `warm` program has had it.
        """
        peak = 0 if warm else self._peak(program)
        samples = [self._sample(program)]
        repeats = int(1e3 * seconds / max(everybody(samples[0])))
        for _ in range(max(FEWEST, min(MOST, repeats)) - 1):
            samples.append(self._sample(program))
        own = Timing(tuple(samples), str(self.place.device))
        timings, peaks = zip(*everybody((own, peak)), strict=True)
        slowest = max(timings, key=lambda timing: timing.median)
        middle = statistics.median(timing.median for timing in timings)
        return {"timing": slowest, "ms": slowest.median, "middle_ms": middle, "peak": max(peaks)}

    def _sample(self, program: Callable[[], Any]) -> float:
        """Milliseconds of one run on this rank, begun with the others."""
        meet(self.place)
        if self.place.device.type == "cpu":
            start = time.perf_counter()
            program()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        program()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _peak(self, program: Callable[[], Any]) -> int:
        """Bytes beyond what there was before, at most."""
        if self.place.device.type == "cpu":
            return measure_peak_memory(program, device="cpu").peak_bytes
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        program()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def _failure(problem: str) -> Row:
    kinds = {
        "OutOfMemoryError": "out of memory",
        "BackendUnavailableError": "unsupported",
        "AttentionInputError": "unsupported",
    }
    status = next((kind for name, kind in kinds.items() if name in problem), "failed")
    remedy = advice(problem) if status != "unsupported" else None
    return {"status": status, "reason": problem if remedy is None else f"{problem} | {remedy}"}
