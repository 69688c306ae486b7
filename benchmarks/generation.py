"""The recorded runs: how fast models decode, prefill and train, beside what bounds them.

python -m benchmarks.generation                       everything that fits here
python -m benchmarks.generation --what decode --save NAME

    decode       tokens/s of the loops, beside the memory bandwidth's bound
    throughput   tokens/s against the time of a step, by batch
    prefill      FLOP/s of a forward, beside a matrix product's, by attention
    training     time and memory of a training step, by attention and length

On a GPU the models have real shapes, on a CPU tiny ones; the weights are random. A case that does
not run is a row as well, with its reason.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention import AttentionInputError, BackendUnavailableError
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import Timing, format_ms, resolve_device
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

COLUMNS = [
    *("what", "name", "compiled", "batch", "seqlen", "new_tokens", "dtype"),
    *("status", "reason", "kernel"),
    *("median_ms", "q1_ms", "q3_ms", "repeats", "tokens_per_s"),
    *("tflops", "ceiling", "of_ceiling", "peak_memory_bytes"),
]


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """The row with what `measure` adds, or with the reason why it did not run."""
    try:
        return row | {"status": "ok", "reason": ""} | measure()
    except (BackendUnavailableError, AttentionInputError) as error:
        return row | {"status": "unsupported", "reason": _one_line(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return row | {"status": "out of memory", "reason": _one_line(error)}
    except Exception as error:
        return row | {"status": "failed", "reason": f"{type(error).__name__}: {_one_line(error)}"}
    finally:
        if torch.cuda.is_available():
            # What a case held and had compiled must be gone before the next one.
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


def times(timing: Timing) -> Row:
    """A timing as columns."""
    names = ("median", "q1", "q3")
    return {f"{name}_ms": getattr(timing, name) for name in names} | {"repeats": timing.repeats}


def run(what: Sequence[str], device: torch.device, *, progress: bool = True) -> pd.DataFrame:
    """Measure; one row a case, with provenance in `.attrs["provenance"]`.

    Columns: what, name, compiled, batch, seqlen (prompt or sequence), new_tokens, dtype; status,
    reason, kernel; median_ms, q1_ms, q3_ms, repeats (of a decode step, a prefill, a training step);
    tokens_per_s; tflops (prefill); ceiling (decode: tokens/s at the measured copy bandwidth;
    prefill: the measured TFLOP/s of a matrix product) and of_ceiling, the part of it that was
    reached; peak_memory_bytes, beyond what there was before.

    Raises:
        ValueError: an unknown name in `what`.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    from benchmarks import generation_decode as benchmark_decode
    from benchmarks import generation_forward as benchmark_forward
    from labsupport.profiling.hardware import measured_ceilings

    cases = {
        "decode": benchmark_decode.decode_cases,
        "throughput": benchmark_decode.throughput_cases,
        "prefill": benchmark_forward.prefill_cases,
        "training": benchmark_forward.training_cases,
    }
    if unknown := sorted(set(what) - set(cases)):
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(cases)}")
    ceilings = measured_ceilings(str(device))
    record = provenance(
        device, copy_gb_s=ceilings.copy_gb_s, matmul_tflops=ceilings.matmul_tflops, weights="random"
    )
    rows: list[Row] = []
    try:
        for name in what:
            for case in tqdm(cases[name](device, ceilings), desc=name, disable=not progress):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of compilers, about small devices
                    rows.append({"what": name} | case())
    except KeyboardInterrupt:
        record["interrupted"] = True
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.attrs["provenance"] = record
    return table


def format_table(table: pd.DataFrame) -> str:
    """The table as aligned text."""
    header = ["what", "name", "batch", "seqlen", "ms", "IQR", "tokens/s", "of ceiling", "memory"]
    lines = [[*header, "kernel or reason"]]
    for _, row in table.iterrows():
        name = f"{row['name']}, compiled" if row["compiled"] is True else row["name"]
        start = [row["what"], name, str(row["batch"]), str(row["seqlen"])]
        if row["status"] != "ok":
            lines.append([*start, *5 * ["-"], f"{row['status']}: {row['reason']}"])
            continue
        share = row["of_ceiling"]
        lines.append(
            [
                *start,
                format_ms(row["median_ms"]),
                f"{format_ms(row['q1_ms'])}-{format_ms(row['q3_ms'])}",
                f"{row['tokens_per_s']:,.0f}",
                "-" if share != share else f"{share:.1%}",
                format_bytes(row["peak_memory_bytes"]),
                row["kernel"],
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    record = table.attrs["provenance"]
    return "\n".join([f"{record['device']}; random weights", *text])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and save when asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=(__doc__ or "").split("\n")[0],
    )
    add = parser.add_argument
    add("--what", default="decode,throughput,prefill,training", help="comma-separated parts")
    add("--device", help="cpu or cuda; default: the GPU if there is one")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    what = [part.strip() for part in options.what.split(",") if part.strip()]
    table = run(what, resolve_device(options.device))
    print(format_table(table))
    save_if_asked(table, options)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


if __name__ == "__main__":
    main()
