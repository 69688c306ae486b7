"""The figures of chapter 8: a measured roofline, waves, predictions and noise."""

import math
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labsupport.analysis.predictor import calibrate_run
from labsupport.analysis.predictor.evaluate import with_predictions
from labsupport.analysis.predictor.predict import NINETY_PERCENT
from labsupport.analysis.roofline import Roof, roofline
from labsupport.plotting import Chart, style
from labsupport.profiling import load_run
from labsupport.profiling.hardware import find_spec

GREY = "#444444"
SLOTS = 132  # multiprocessors of an H200


def _plain(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def measured_roofline() -> Figure:
    """Prefill, training and decoding of recorded runs under two roofs of an H200."""
    spec = find_spec("NVIDIA H200")
    assert spec is not None
    peak, slope = Roof.of(spec).peak("bfloat16"), spec.bandwidth_gb_s / 1e3
    decode = load_run("decode-h200")
    copy = decode.attrs["provenance"]["copy_gb_s"] / 1e3  # TB/s
    training = load_run("h200-training").attrs["provenance"]["matmul_tflops"]["bfloat16"]
    prefill = load_run("h200-decode").attrs["provenance"]["matmul_tflops"]["bfloat16"]
    figure = Chart(figsize=(9.2, 5.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    ends = (1.5, 20_000)
    for label, top, rise, dashes in (
        (f"specified: {peak:.0f} TFLOP/s, {slope * 1e3:.0f} GB/s", peak, slope, "-"),
        (f"measured: {training:.0f} TFLOP/s, {copy * 1e3:.0f} GB/s", training, copy, "--"),
    ):
        x = [ends[0], top / rise, ends[1]]
        y = [min(top, rise * i) for i in x]
        axes.plot(x, y, dashes, color=GREY, linewidth=1.6, label=label, zorder=1)
    axes.fill_between(
        [prefill / copy, ends[1]], prefill, training, color="#bbbbbb", alpha=0.5, zorder=0,
        label=f"the same product in an earlier run: {prefill:.0f}",
    )  # fmt: skip
    peers = load_run("peers-h200")
    peers = roofline(peers[(peers.head_dim == 128) & ~peers.causal], spec)
    for backend in ("fa4", "sdpa_cudnn", "flash_triton", "sdpa_flash"):
        colour, marker = style(backend)
        for direction, filled in (("forward", True), ("forward+backward", False)):
            rows = peers[(peers.backend == backend) & (peers.direction == direction)]
            axes.plot(
                rows.intensity, rows.tflops, marker, color=colour, markersize=7,
                markerfacecolor=colour if filled else "white", label=backend if filled else None,
            )  # fmt: skip
    for batch, filled in ((1, False), (8, True)):
        rows = decode[(decode.implementation == "decode") & (decode.batch == batch)]
        flops = 4 * rows.batch * rows.heads * rows["keys"] * rows.head_dim
        colour, marker = style("flash_triton")
        axes.plot(
            flops / rows.cache_bytes, flops / rows.median_ms / 1e9, marker, color=colour,
            markersize=7, markerfacecolor=colour if filled else "white",
        )  # fmt: skip
    axes.annotate(
        "decoding, 4 query heads for a key head:\nfilled batch 8, hollow batch 1", (4, 17),
        xytext=(14, -22), textcoords="offset points", fontsize=9, color=GREY,
    )  # fmt: skip
    axes.annotate(
        "512 to 16,384 tokens (left to right):\nfilled forward, hollow with the backward",
        (330, 130), fontsize=9, color=GREY,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(6, 2000))
    axes.set_xlabel("arithmetic intensity (FLOPs a byte that must move)")
    axes.set_ylabel("speed (TFLOP/s)")
    _plain(axes)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.headline(
        "Decoding reaches the slope; prefill lies right of the ridge, and below the roof",
        "NVIDIA H200, bfloat16, head_dim 128, no mask; data/runs/peers-h200 (kernels by CUDA graph)"
        " and decode-h200; intensities by formula.\nRoofs: data/hardware.csv; the provenance of "
        "h200-training, h200-decode and decode-h200.",
    )
    return figure


@dataclass(frozen=True)
class _Waves:
    """Version 2's plain kernel at one head_dim, and how many programs a multiprocessor holds."""

    head_dim: int
    programs: int
    colour: str
    marker: str


WAVES = (_Waves(128, 1, "#0072B2", "o"), _Waves(64, 2, "#D55E00", "s"))


def waves() -> Figure:
    """Left: the share of the slots at work, by formula. Right: recorded times on the staircase."""
    figure = Chart(figsize=(10.2, 4.8), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = list(range(1, 1100))
    for kind in WAVES:
        slots = SLOTS * kind.programs
        used = [n / (slots * math.ceil(n / slots)) for n in counts]
        at_once = f"{kind.programs} at a time on a multiprocessor ({slots} slots)"
        left.plot(counts, used, color=kind.colour, linewidth=1.6, label=at_once)
    left.set(xlim=(0, 1100), ylim=(0, 1.25), xlabel="programs")
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    left.set_ylabel("share of the slots at work")
    left.set_title("by formula: n / (slots × ⌈n / slots⌉)", fontsize=10, loc="left")
    left.legend(loc="upper right", frameon=False, fontsize=9)
    run = load_run("loop-orders-h200")
    run = run[~run.causal & (run.seqlen == 16_384)]
    for kind in WAVES:
        rows = run[run.head_dim == kind.head_dim].set_index("version2_programs").version2_ms
        slots = SLOTS * kind.programs
        wave = rows.loc[128 * kind.programs]  # the fullest wave that was recorded
        steps = [wave * math.ceil(n / slots) for n in counts]
        right.plot(
            counts, steps, color=kind.colour, linewidth=1.4,
            label=f"head_dim {kind.head_dim}: waves of {slots} programs, {wave:.2f} ms each",
        )  # fmt: skip
        known = rows[rows.index < counts[-1]]
        right.plot(
            known.index, known, kind.marker, color=kind.colour, markersize=8, linestyle="none",
            markeredgecolor="white", zorder=3,
        )  # fmt: skip
    right.set(xlim=(0, 1100), ylim=(0, 3.6), xlabel="programs (128 a head)")
    right.set_ylabel("time (ms)")
    right.set_title("lines: waves by formula; points: recorded", fontsize=10, loc="left")
    right.legend(loc="upper left", frameon=False, fontsize=9)
    for axes in (left, right):
        _plain(axes)
    figure.headline(
        "Time goes up in steps: one program more than fits can cost a whole wave",
        "NVIDIA H200 (132 multiprocessors). Recorded: data/runs/loop-orders-h200, version 2 with "
        "tiles of 128 x 64, bfloat16, 16,384 tokens, no mask, 1, 2, 4 and 8 heads.\n"
        "No point was recorded just behind a step; each line's height is that of one point.",
    )
    return figure


def predicted() -> Figure:
    """Predicted over measured times of the shapes that were held out, two runs."""
    figure = Chart(figsize=(10.2, 5.0), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    shown: dict[str, None] = {}
    for axes, run in zip(panels, ("attention-h200", "peers-h200"), strict=True):
        model, held_out = calibrate_run(run)
        table = with_predictions(held_out, model)
        factor = math.exp(NINETY_PERCENT * model.spread)
        axes.axhspan(1 / factor, factor, color="#dddddd", zorder=0)
        axes.axhline(1, color=GREY, linewidth=1.2, zorder=1)
        for backend in dict.fromkeys(table.backend):
            shown[backend] = None
            colour, marker = style(backend)
            for direction, filled in (("forward", True), ("forward+backward", False)):
                rows = table[(table.backend == backend) & (table.direction == direction)]
                axes.plot(
                    rows.ms, rows.predicted_ms / rows.ms, marker, color=colour, markersize=6.5,
                    markerfacecolor=colour if filled else "white",
                )  # fmt: skip
        inside = table.covered.mean()
        axes.set_title(
            f"{run}: mean error {table.error.abs().mean():.1%},\n"
            f"{inside:.0%} of {len(table)} cases inside the grey interval",
            fontsize=10, loc="left",
        )  # fmt: skip
        axes.set(xscale="log", yscale="log", ylim=(0.68, 1.47), xlabel="measured (ms)")
        axes.set_yticks([0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4], [], minor=False)
        axes.set_yticklabels(["0.7", "0.8", "0.9", "1", "1.1", "1.2", "1.4"])
        axes.set_yticks([], minor=True)
        _plain(axes)
    panels[0].set_ylabel("predicted / measured")
    handles = [
        panels[0].plot([], [], style(name)[1], color=style(name)[0], markersize=6.5)[0]
        for name in shown
    ]
    figure.legend(handles, list(shown), loc="outside right center", frameon=False, fontsize=9)
    figure.headline(
        "Held-out shapes: most within a few percent; the large errors are mostly short calls",
        "NVIDIA H200, bfloat16; lengths that no weight was fitted to (labsupport.analysis.predictor"
        ", split.py). Filled: forward; hollow: with the backward.\nLeft: calls from Python, "
        "head_dim 64. Right: kernels replayed from a CUDA graph, head_dim 64 and 128.",
    )
    return figure


def noise() -> Figure:
    """One unchanged call on a busy machine: its time, and its ratio to a reference in turns."""
    table = load_run("noise-cpu-busy")
    table = table[table["case"] == "short"].assign(ratio=lambda t: t.case_ms / t.reference_ms)
    each: pd.DataFrame = table.groupby("process").median(numeric_only=True)
    figure = Chart(figsize=(9.2, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for column, label, colour, marker in (
        ("case_ms", "time of the call", "#D55E00", "s"),
        ("ratio", "time over the reference's, in turns", "#0072B2", "o"),
    ):
        values = each[column] / each[column].median()
        axes.plot(
            each.started_s / 60, values, "-", marker=marker, color=colour, markersize=4.5,
            linewidth=1.2, label=label,
        )  # fmt: skip
    axes.axhline(1.05, color=GREY, linestyle=":", linewidth=1.2)
    axes.text(each.started_s.max() / 60, 1.055, "5% slower", ha="right", fontsize=9, color=GREY)
    axes.set(xlabel="minutes since the run began", ylabel="over its own median")
    _plain(axes)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    figure.headline(
        "The program did not change; the machine did",
        "data/runs/noise-cpu-busy: the call of 3 ms (sdpa_flash, 512 tokens, 4 heads, float32) on "
        "two cores of an AMD EPYC beside other programs;\na point is the median of 41 pairs in one "
        "fresh process.",
    )
    return figure


FIGURES = {
    "theory/figures/performance-roofline.png": measured_roofline,
    "theory/figures/performance-waves.png": waves,
    "theory/figures/performance-predicted.png": predicted,
    "theory/figures/performance-noise.png": noise,
}
