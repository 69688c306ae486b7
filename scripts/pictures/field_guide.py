"""The figures of chapter 10: which backend to ask for, and what the choice is worth."""

import _draw as d
from matplotlib.patches import FancyBboxPatch

from labsupport.profiling import load_run

# The same colour for the same backend in all panels.
STYLES = {
    "fa4": (d.GREEN, "D"),
    "sdpa_cudnn": (d.SKY, "s"),
    "flash_triton": (d.PINK, "v"),
    "flex": (d.ORANGE, "^"),
    "sdpa_flash": (d.BLUE, "o"),
    "sdpa_efficient": ("#999999", "P"),
    "standard": (d.RED, "X"),
}

# A question, and what to ask for when the answer is yes.
QUESTIONS = (
    ("no GPU", "sdpa_flash on a CPU, in any floating dtype"),
    ("an AMD GPU", "sdpa_flash, of PyTorch's ROCm build (not tried by the lab)"),
    ("compute capability below 8.0 (T4, RTX 20xx)", "sdpa_efficient, in float16 or float32"),
    ("float32 on a GPU", "sdpa_efficient; flex"),
    ("a mask of your own", "flex, if it is a rule; sdpa_efficient, if it is a tensor"),
    ("ALiBi", "fa2; flex; flash_triton"),
    ("a window", "fa4; flash_gluon; fa2; flex"),
    ("packed documents", "fa4 or fa2 (varlen); flash_triton"),
    ("dropout on the weights", "fa2; SDPA's fused kernels on a GPU (not fa4, not flex)"),
    ("one query, long cache", "a kernel that splits the keys: sdpa_cudnn, sdpa_flash, decode"),
    ("compute capability 9.0 or 10.x", "fa4, if installed; else sdpa_cudnn"),
)


@d.picture("field-decision.png", (10.2, 7.6))
def decision(axes):
    """The questions, from the top; the first yes decides."""
    axes.set(xlim=(0, 13.2), ylim=(len(QUESTIONS) + 0.45, -0.5))
    axes.axis("off")

    def rounded(x, y, width, text, colour):
        axes.add_patch(
            FancyBboxPatch((x, y - 0.32), width, 0.64, boxstyle="round,pad=0,rounding_size=0.14",
                           facecolor=colour, edgecolor="none")
        )  # fmt: skip
        d.words(axes, x + 0.16, y, text, 10, "black", va="center")

    for row, (question, answer) in enumerate(QUESTIONS):
        rounded(0, row, 5.0, question + "?", d.PALE)
        d.arrow(axes, (5.05, row), (6.15, row), 1.4)
        d.words(axes, 5.6, row - 0.17, "yes", 8.5, ha="center", va="center")
        rounded(6.2, row, 6.9, answer, d.TILE)
        d.arrow(axes, (2.5, row + 0.33), (2.5, row + 0.67), 1.4)
        d.words(axes, 2.64, row + 0.5, "no", 8.5, va="center")
    rounded(0, len(QUESTIONS), 5.0, "sdpa_flash, or fa2", "#CDE8D8")
    return (
        "Ask from the top: the first yes decides, and a measurement on your GPU has the last word",
        "Names are the lab's backends; what each takes: labsupport/attention/implementations.py, "
        "and the sources of the chapter.",
    )


@d.picture("field-choice.png", (10.2, 4.8), 1, 3, sharey=True)
def worth(panels):
    """A training step's attention: each backend over the fastest, by length."""
    called, kernels = (
        run[run.causal & (run.direction == "forward+backward") & (run.status == "ok")]
        for run in (load_run("attention-h200"), load_run("peers-h200"))
    )
    lines = {}
    for axes, rows, text in zip(panels, (
        called, kernels[kernels.head_dim == 64], kernels[kernels.head_dim == 128]
    ), ("calls from Python, head_dim 64", "kernels alone, head_dim 64",
        "kernels alone, head_dim 128"), strict=True):  # fmt: skip
        times = rows.pivot_table(index="seqlen", columns="backend", values="median_ms")
        over = times.div(times.min(axis=1), axis=0)
        for name, (colour, marker) in STYLES.items():
            if name in over:
                look = {"color": colour, "marker": marker, "linewidth": 1.8}
                (lines[name],) = axes.plot(over.index, over[name], **look)
        d.log(axes, over.index, [1, 2, 5, 10, 20], "sequence length", ylim=(0.9, 24))
        axes.set_xticklabels(map(d.short_count, over.index))
        axes.minorticks_off()
        d.above(axes, text)
        d.plain(axes)
    panels[0].set_ylabel("time, over the fastest at that length")
    order = [name for name in STYLES if name in lines]
    d.legend(panels[2], ncols=2, handles=[lines[name] for name in order], labels=order)
    return (
        "From 2K tokens on fa4 and cuDNN lead; below, the cost of a call from Python decides",
        "H200, bfloat16, causal, forward and backward. Left: data/runs/attention-h200, batch 4, 16 "
        "heads.\nMiddle, right: data/runs/peers-h200, 16,384 tokens a call, hidden width 2,048.",
    )
