"""A report's numbers, with their provenance: errors, times and memory of both attentions.

`python measure.py` compares the attentions of `train.py` in whole training steps (forward and
backward), length by length, and writes `results/steps/`. It knows nothing of the model: any program
that has LENGTHS, ATTENTIONS, `make_model`, `make_batch` and `loss_of` can be measured so.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
import train
from torch import Tensor
from train import ATTENTIONS, LENGTHS, Attention, loss_of, make_batch, make_model

from labsupport.attention import compare_with_oracle, last_call
from labsupport.attention.accuracy import ErrorReport
from labsupport.profiling import largest_tensor, measure_peak_memory, save_run
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import measure_interleaved, ratio_of

HERE = Path(train.__file__).resolve().parent


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention at all: what is left of a step's time then is not attention's."""
    return v


def make_step(attention: Attention, seqlen: int, device: str) -> Callable[[], None]:
    """Return a call that runs one pass forward and backward, and leaves no gradients."""
    model = make_model(attention).to(device)
    inputs, labels = (x.to(device) for x in make_batch(seqlen))

    def step() -> None:
        loss_of(model, (inputs, labels)).backward()
        model.zero_grad()

    return step


def gradients(attention: Attention, seqlen: int, dtype: torch.dtype, device: str) -> Tensor:
    """All gradients of one step in a row, with the loss in front."""
    model = make_model(attention).to(device, dtype)
    loss = loss_of(model, tuple(x.to(device) for x in make_batch(seqlen)))
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])


def judge(seqlen: int, device: str) -> ErrorReport:
    """Flash's gradients in float32 by the lab's rule: beside the naive ones, against float64."""
    naive, flash = ATTENTIONS["naive"], ATTENTIONS["flash"]
    return compare_with_oracle(
        gradients(flash, seqlen, torch.float32, device),
        gradients(naive, seqlen, torch.float32, device),
        gradients(naive, seqlen, torch.float64, device),
        gradient=True,
    )


def measure(lengths: tuple[int, ...], device: str, seconds: float) -> pd.DataFrame:
    """A row for each length: time and memory of a step, with each attention and with none."""
    rows = []
    for seqlen in lengths:
        attentions = {**ATTENTIONS, "nothing": nothing}
        steps = {name: make_step(kind, seqlen, device) for name, kind in attentions.items()}
        timings = measure_interleaved(steps, device=device, max_seconds=seconds)
        ratio = ratio_of(timings["naive"], timings["flash"], ("naive", "flash"))
        row = {"seqlen": seqlen, "gain": ratio.median, "gain_q1": ratio.q1, "gain_q3": ratio.q3}
        row["pairs"] = len(ratio.samples)
        for name, step in steps.items():
            row[f"{name}_ms"] = timings[name].median
            row[f"{name}_peak_bytes"] = measure_peak_memory(step, device=device).peak_bytes
            row[f"{name}_largest_bytes"] = largest_tensor(step).nbytes
        rows.append(row)
        print(f"{seqlen:5} tokens: {ratio}")
    table = pd.DataFrame(rows)
    # Of the naive step's time; more than the whole model's gain, no attention can bring.
    table["attention_share"] = 1 - table.nothing_ms / table.naive_ms
    table["limit"] = table.naive_ms / table.nothing_ms
    return table


def readable(table: pd.DataFrame) -> str:
    """The report's part of the table: milliseconds, MiB, and the ratios."""
    shown = table[["seqlen", "pairs", "naive_ms", "flash_ms", "gain", "limit", "attention_share"]]
    shown = shown.round(2)
    for name in ("naive", "flash"):
        shown[f"{name}_MiB"] = (table[f"{name}_peak_bytes"] / 2**20).round(1)
    return shown.to_string(index=False)


def main() -> None:
    """Judge, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring, for each length")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="where steps/ is written"
    )
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    verdict = judge(min(given.lengths), device)
    print("gradients:", verdict)
    print("kernel:", str(last_call()).splitlines()[0])
    table = measure(tuple(given.lengths), device, given.seconds)
    print(readable(table))
    table.attrs["provenance"] = provenance(device, gradients=str(verdict))
    print("saved:", save_run(table, "steps", folder=given.out, overwrite=True))


if __name__ == "__main__":
    main()
