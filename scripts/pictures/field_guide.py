"""The figures of chapter 10: which backend to ask for, and what the choice is worth."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from pandas import DataFrame

from labsupport.plotting import Chart
from labsupport.profiling import load_run

GREY = "#444444"
ASK, ANSWER, LAST = "#EEEEEE", "#BFDDF0", "#CDE8D8"
# The same colour for the same backend in all panels.
STYLES = {
    "fa4": ("#009E73", "D"),
    "sdpa_cudnn": ("#56B4E9", "s"),
    "flash_triton": ("#CC79A7", "v"),
    "flex": ("#E69F00", "^"),
    "sdpa_flash": ("#0072B2", "o"),
    "sdpa_efficient": ("#999999", "P"),
    "standard": ("#D55E00", "X"),
}

# A question, and what to ask for when the answer is yes.
QUESTIONS = (
    ("no NVIDIA GPU", "sdpa_flash on a CPU, in any floating dtype"),
    ("compute capability below 8.0 (T4, RTX 20xx)", "sdpa_efficient, in float16 or float32"),
    ("float32 on a GPU", "sdpa_efficient; flex"),
    ("a mask of your own", "flex, if it is a rule; sdpa_efficient, if it is a tensor"),
    ("ALiBi", "fa2; flex; flash_triton"),
    ("a window", "fa4; fa2; flex; flash_triton"),
    ("packed documents", "fa4 or fa2 (varlen); flash_triton"),
    ("dropout on the weights", "fa2; SDPA's fused kernels on a GPU (not fa4, not flex)"),
    ("one query, long cache", "a kernel that splits the keys: sdpa_cudnn, sdpa_flash, decode"),
    ("compute capability 9.0 or 10.x", "fa4, if installed; else sdpa_cudnn"),
)


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y - 0.32), width, 0.64, boxstyle="round,pad=0,rounding_size=0.14",
                       facecolor=colour, edgecolor="none")
    )  # fmt: skip
    axes.text(x + 0.16, y, text, ha="left", va="center", fontsize=10)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.4})
    across = start[1] == end[1]
    axes.text(
        (start[0] + end[0]) / 2 + (0 if across else 0.14),
        start[1] - 0.17 if across else (start[1] + end[1]) / 2,
        text, ha="center" if across else "left", va="center", fontsize=8.5, color=GREY,
    )  # fmt: skip


def decision() -> Figure:
    """The questions, from the top; the first yes decides."""
    figure = Chart(figsize=(10.2, 7.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 13.2), ylim=(len(QUESTIONS) + 0.45, -0.5))
    axes.axis("off")
    for row, (question, answer) in enumerate(QUESTIONS):
        _box(axes, 0, row, 5.0, question + "?", ASK)
        _arrow(axes, (5.05, row), (6.15, row), "yes")
        _box(axes, 6.2, row, 6.9, answer, ANSWER)
        _arrow(axes, (2.5, row + 0.33), (2.5, row + 0.67), "no")
    _box(axes, 0, len(QUESTIONS), 5.0, "sdpa_flash, or fa2", LAST)
    figure.headline(
        "Ask from the top: the first yes decides, and a measurement on your GPU has the last word",
        "Names are the lab's backends; what each takes: labsupport/attention/implementations.py, "
        "and the sources of the chapter.",
    )
    return figure


def _panel(axes: Axes, rows: DataFrame, title: str) -> None:
    times = rows.pivot_table(index="seqlen", columns="backend", values="median_ms")
    over = times.div(times.min(axis=1), axis=0)
    for name, (colour, marker) in STYLES.items():
        if name in over:
            axes.plot(over.index, over[name], color=colour, marker=marker, linewidth=1.8,
                      label=name)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(over.index, [f"{n // 1024}K" if n >= 1024 else str(n) for n in over.index])
    axes.set_ylim(0.9, 24)
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("sequence length")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def worth() -> Figure:
    """A training step's attention: each backend over the fastest, by length."""
    figure = Chart(figsize=(10.2, 4.8), dpi=110, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    called, kernels = load_run("attention-h200"), load_run("peers-h200")
    step = "forward+backward"
    called = called[called.causal & (called.direction == step) & (called.status == "ok")]
    kernels = kernels[kernels.causal & (kernels.direction == step) & (kernels.status == "ok")]
    _panel(left, called, "calls from Python, head_dim 64")
    _panel(middle, kernels[kernels.head_dim == 64], "kernels alone, head_dim 64")
    _panel(right, kernels[kernels.head_dim == 128], "kernels alone, head_dim 128")
    left.set_ylabel("time, over the fastest at that length")
    handles = {
        label: line
        for axes in (left, middle)
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = [name for name in STYLES if name in handles]
    right.legend(
        [handles[name] for name in order], order, loc="upper left", ncols=2, frameon=False,
        fontsize=9,
    )  # fmt: skip
    figure.headline(
        "From 2K tokens on fa4 and cuDNN lead; below, the cost of a call from Python decides",
        "H200, bfloat16, causal, forward and backward. Left: data/runs/attention-h200, batch 4, 16 "
        "heads.\nMiddle, right: data/runs/peers-h200, 16,384 tokens a call, hidden width 2,048.",
    )
    return figure


FIGURES = {
    "theory/figures/field-decision.png": decision,
    "theory/figures/field-choice.png": worth,
}
