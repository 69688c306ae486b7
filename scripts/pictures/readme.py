"""The README's picture, from the recorded runs."""

import _draw as d
from matplotlib.figure import Figure

from labsupport import plotting
from labsupport.profiling import load_run, score_mib


def memory() -> Figure:
    """Peak memory of four implementations on an H200."""
    run = load_run("attention-h200")
    rows = run[~run.causal & (run.direction == "forward")]
    rows = rows[rows.backend.isin(["standard", "flash_torch", "sdpa_flash", "fa4"])]
    return plotting.plot_memory(
        rows,
        title="The textbook pays for every pair of tokens; FlashAttention does not",
        references=[plotting.Reference("S and P by formula", score_mib(rows))],
    )


d.FIGURES["docs/memory-h200.png"] = memory
