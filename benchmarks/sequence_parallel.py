"""Training steps with a sharded sequence: time, memory and loss by length and kernel.

torchrun --nproc-per-node 8 -m benchmarks sequence_parallel \\
    --preset gpt2-small --lengths 128K,1M --kernels native --save NAME
python -m benchmarks sequence_parallel --processes 2 --preset tiny --lengths 1K

All cases run in the same processes. Usually all ranks run out of memory together, which makes
a row. If only some do, the others wait for them, and the run ends after --case-limit (earlier rows
are saved).
"""

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from benchmarks import runner
from benchmarks.data_parallel import on_all_ranks
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.distributed.ring import last_ring_call
from labsupport.distributed.ring.kernels import KERNELS
from labsupport.distributed.sequence_parallel import shard_length, shard_model
from labsupport.profiling.grids import refusal
from labsupport.profiling.timing import Timing
from labsupport.training import PRESETS, Decoder, DecoderConfig, StepRow, TrainConfig
from labsupport.training.planner import STRATEGIES
from labsupport.training.train import Trainer

# Around a ring attention takes all heads.
NUMBERS = [n for n, strategy in enumerate(STRATEGIES) if strategy.savings.head_chunk is None]


@dataclass(frozen=True)
class RingStep:
    """One row of the table: a step of a preset's decoder, batch 1.

    kernel, layout ("zigzag", "contiguous"): of the ring. savings: a number in
    `planner.STRATEGIES`, whose savings and autocast apply.
    """

    preset: str
    seqlen: int
    kernel: str = "auto"
    layout: str = "zigzag"
    savings: int = NUMBERS[-1]


def add_options(parser: ArgumentParser) -> None:
    kernels = runner.some_of(["auto", *(kernel.name for kernel in KERNELS)])
    layouts = runner.some_of(["zigzag", "contiguous"])
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", type=runner.lengths, default="1K", help="tokens, such as 128K,1M")
    add("--kernels", type=kernels, default="auto", help="of the ring, separated by commas")
    add("--layouts", type=layouts, default="zigzag", help="zigzag, contiguous, or both")
    add(
        "--savings",
        "--rung",
        type=int,
        choices=NUMBERS,
        default=NUMBERS[-1],
        help="how to save memory",
    )
    add("--repeats", type=int, default=3, help="steps that are timed (default: %(default)s)")
    add("--max-seconds", type=float, default=60.0, help="for the steps of a case")
    add("--processes", type=int, default=2, help="to start where torchrun did not")
    add("--case-limit", type=float, default=300.0, help="seconds that a rank waits for another")


def measure(options: Namespace) -> pd.DataFrame | None:
    chosen = itertools.product(options.lengths, options.kernels, options.layouts)
    cases = [RingStep(options.preset, *one, options.savings) for one in chosen]
    function = partial(measure_cases, cases, options.repeats, options.max_seconds)
    return on_all_ranks(function, options, options.case_limit)


def measure_cases(cases: Sequence[RingStep], *settings: Any, on_rows: Any = None) -> pd.DataFrame:
    """Measure cases on the process group that `setup_ddp` made; every rank calls this."""
    info = RankInfo.current()
    chosen = [
        runner.Trial(row_of(case, info.world), partial(measure_case, case, *settings))
        for case in cases
    ]
    about = {"world": info.world, "backend": dist.get_backend()}
    return runner.run(chosen, info.device, progress=info.rank == 0, on_rows=on_rows, **about)


def show(table: pd.DataFrame, options: Namespace) -> str:
    columns = ["preset", "seqlen", "kernel", "layout", "world", "median_ms", "tokens_per_s"]
    columns += ["tflops", "peak_memory_bytes", "loss", "status", "reason"]
    return table.reindex(columns=columns).to_string(index=False, na_rep="")


def row_of(case: RingStep, world: int) -> runner.Row:
    """Return the columns that are known beforehand."""
    strategy = STRATEGIES[case.savings]
    return asdict(case) | {
        "strategy": "ring",
        "world": world,
        "seqlen_per_rank": shard_length(case.seqlen, world, zigzag=case.layout == "zigzag"),
        "savings": strategy.name,
        "direction": "training step",
        "dtype": "float32"
        if strategy.autocast is None
        else f"{strategy.autocast} autocast".split(".")[-1],
    }


def measure_case(case: RingStep, repeats: int = 3, max_seconds: float = 60.0) -> runner.Row:
    """Measure training steps; every rank of the process group calls this.

    Args:
        repeats: steps that are timed, after one that is not.
        max_seconds: no further step is begun after so long; one is always timed.

    Returns:
        kernel, which ran; median_ms, q1_ms, q3_ms over the steps, of which each is as long as on
        the slowest rank; first_ms, the step before them; repeats; tokens_per_s; attention_tflops,
        per device, if attention took all of the time: a lower bound of its speed, recomputation not
        counted; tflops, per device, of all matrix products; peak_memory_bytes of the rank that took
        most, peak_memory_by_rank; loss of the first step. Or status ("out of memory",
        "unsupported") and reason. The same on all ranks.

    Raises:
        SystemExit: an error that other ranks may not share; this rank's next case would meet their
            last one.
    """
    info, row, failed = RankInfo.current(), {}, ""
    try:
        row = _timed(case, info, repeats, max_seconds)
    except Exception as error:
        found = refusal(error)
        if isinstance(error, ValueError) or found["status"] == "unsupported":  # on all ranks alike
            return found | {"status": "unsupported"}
        failed = f"rank {info.rank}: {found['reason']}"
        if found["status"] != "out of memory":
            raise SystemExit(failed) from error
    reasons = [reason for reason in all_gather_object(failed) if reason]
    return {"status": "out of memory", "reason": reasons[0]} if reasons else row


def _timed(case: RingStep, info: RankInfo, repeats: int, max_seconds: float) -> dict[str, Any]:
    config, strategy = DecoderConfig.preset(case.preset), STRATEGIES[case.savings]
    torch.manual_seed(0)
    # The ring is the attention; what else the strategy saves, it saves here too.
    model = Decoder(config, replace(strategy.savings, attention="auto")).to(info.device)
    tokens = torch.randint(
        config.vocab_size, (1, case.seqlen + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    settings = TrainConfig(repeats + 1, 1e-4, max_grad_norm=None, autocast=strategy.autocast)
    seconds, rows, began = list[float](), list[StepRow](), time.perf_counter()
    with shard_model(model, zigzag=case.layout == "zigzag", kernel=case.kernel) as sharded:
        trainer = Trainer(
            model, settings, group=dist.group.WORLD, device=info.device, one_sequence=True
        )
        while len(rows) <= repeats:
            info.barrier()
            start = time.perf_counter()
            rows.append(trainer.step(len(rows), [sharded.shard(batch)]))
            now = time.perf_counter()
            times = all_gather_object((now - start, now - began))
            seconds.append(max(step for step, _ in times))
            if len(seconds) > 1 and max(total for _, total in times) > max_seconds:
                break
    peaks = all_gather_object(max(row.peak_bytes for row in rows))
    report = last_ring_call()
    assert report is not None
    timing = Timing(tuple(1000 * step for step in seconds[1:]))
    # Per token, forward and backward: 6 operations for each weight of a matrix product.
    matrices = config.parameters - config.vocab_size * config.width * (0 if config.tied else 1)
    attention = 3.5 * 2 * config.layers * case.seqlen**2 * config.width
    device_ms = timing.median * info.world * 1e9
    return runner.spread(timing) | {
        "kernel": report.kernel,
        "first_ms": 1000 * seconds[0],
        "tokens_per_s": 1000 * case.seqlen / timing.median,
        "attention_tflops": attention / device_ms,
        "tflops": (attention + 6 * matrices * case.seqlen) / device_ms,
        "peak_memory_bytes": max(peaks),
        "peak_memory_by_rank": " ".join(map(str, peaks)),
        "loss": rows[0].loss,
    }
