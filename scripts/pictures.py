"""Draw the pictures of the README from the recorded runs: `make pictures`."""

from pathlib import Path

from labsupport import plotting
from labsupport.profiling import load_run, score_mib

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    """Write docs/memory-h200.png."""
    run = load_run("attention-h200")
    rows = run[~run.causal & (run.direction == "forward")]
    rows = rows[rows.backend.isin(["standard", "flash_torch", "sdpa_flash", "fa4"])]
    figure = plotting.plot_memory(
        rows,
        title="The textbook pays for every pair of tokens; FlashAttention does not",
        references=[plotting.Reference("S and P by formula", score_mib(rows))],
    )
    DOCS.mkdir(exist_ok=True)
    figure.savefig(DOCS / "memory-h200.png", dpi=110)


if __name__ == "__main__":
    main()
