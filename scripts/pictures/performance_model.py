"""The figures of chapter 8: a measured roofline, waves, predictions and noise."""

import math

import _draw as d

from labsupport.analysis.predictor import NINETY_PERCENT, calibrate_run, with_predictions
from labsupport.analysis.roofline import Roof, roofline
from labsupport.plotting import style
from labsupport.profiling import load_run
from labsupport.profiling.hardware import find_spec

SLOTS = 132  # multiprocessors of an H200
DIRECTIONS = (("forward", True), ("forward+backward", False))  # filled, hollow


def _points(axes, x, y, backend, filled, size=7, **options):
    colour, marker = style(backend)
    inside = colour if filled else "white"
    axes.plot(x, y, marker, color=colour, markersize=size, markerfacecolor=inside, **options)


@d.picture("performance-roofline.png", (9.2, 5.4))
def measured_roofline(axes):
    """Prefill, training and decoding of recorded runs under two roofs of an H200."""
    spec = find_spec("NVIDIA H200")
    assert spec is not None
    peak, slope = Roof.of(spec).peak("bfloat16"), spec.bandwidth_gb_s / 1e3
    decode = load_run("decode-h200")
    copy = decode.attrs["provenance"]["copy_gb_s"] / 1e3  # TB/s
    training = load_run("h200-training").attrs["provenance"]["matmul_tflops"]["bfloat16"]
    prefill = load_run("h200-decode").attrs["provenance"]["matmul_tflops"]["bfloat16"]
    ends = (1.5, 20_000)
    for name, top, rise, dashes in (
        ("specified", peak, slope, "-"), ("measured", training, copy, "--")
    ):  # fmt: skip
        x = [ends[0], top / rise, ends[1]]
        axes.plot(x, [min(top, rise * i) for i in x], dashes, color=d.GREY, linewidth=1.6, zorder=1,
                  label=f"{name}: {top:.0f} TFLOP/s, {rise * 1e3:.0f} GB/s")  # fmt: skip
    axes.fill_between(
        [prefill / copy, ends[1]], prefill, training, color="#bbbbbb", alpha=0.5, zorder=0,
        label=f"the same product in an earlier run: {prefill:.0f}",
    )  # fmt: skip
    peers = load_run("peers-h200")
    peers = roofline(peers[(peers.head_dim == 128) & ~peers.causal], spec)
    for backend in ("fa4", "sdpa_cudnn", "flash_triton", "sdpa_flash"):
        for direction, filled in DIRECTIONS:
            rows = peers[(peers.backend == backend) & (peers.direction == direction)]
            label = backend if filled else None
            _points(axes, rows.intensity, rows.tflops, backend, filled, label=label)
    for batch, filled in ((1, False), (8, True)):
        rows = decode[(decode.implementation == "decode") & (decode.batch == batch)]
        flops = 4 * rows.batch * rows.heads * rows["keys"] * rows.head_dim
        speed = flops / rows.median_ms / 1e9
        _points(axes, flops / rows.cache_bytes, speed, "flash_triton", filled)
    words = "decoding, 4 query heads for a key head:\nfilled batch 8, hollow batch 1"
    d.note(axes, words, (4, 17), (14, -22))
    words = "512 to 16,384 tokens (left to right):\nfilled forward, hollow with the backward"
    d.note(axes, words, (330, 130), (0, 0))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(6, 2000))
    axes.set_xlabel("arithmetic intensity (FLOPs a byte that must move)")
    axes.set_ylabel("speed (TFLOP/s)")
    d.plain(axes)
    d.legend(axes)
    return (
        "Decoding reaches the slope; prefill lies right of the ridge, and below the roof",
        "NVIDIA H200, bfloat16, head_dim 128, no mask; data/runs/peers-h200 (kernels by CUDA graph)"
        " and decode-h200; intensities by formula.\nRoofs: data/hardware.csv; the provenance of "
        "h200-training, h200-decode and decode-h200.",
    )


@d.picture("performance-waves.png", (10.2, 4.8), 1, 2)
def waves(panels):
    """Left: the share of the slots at work, by formula. Right: recorded times on the staircase."""
    left, right = panels
    counts = list(range(1, 1100))
    run = load_run("loop-orders-h200")
    run = run[~run.causal & (run.seqlen == 16_384)]
    # Version 2's plain kernel at two head_dims: programs that a multiprocessor holds.
    for head_dim, programs, colour, marker in ((128, 1, d.BLUE, "o"), (64, 2, d.RED, "s")):
        slots = SLOTS * programs
        used = [n / (slots * math.ceil(n / slots)) for n in counts]
        left.plot(counts, used, color=colour, linewidth=1.6,
                  label=f"{programs} at a time on a multiprocessor ({slots} slots)")  # fmt: skip
        rows = run[run.head_dim == head_dim].set_index("version2_programs").version2_ms
        wave = rows.loc[128 * programs]  # the fullest wave that was recorded
        right.plot(
            counts, [wave * math.ceil(n / slots) for n in counts], color=colour, linewidth=1.4,
            label=f"head_dim {head_dim}: waves of {slots} programs, {wave:.2f} ms each",
        )  # fmt: skip
        known = rows[rows.index < counts[-1]]
        right.plot(known.index, known, marker, color=colour, markersize=8, linestyle="none",
                   markeredgecolor="white", zorder=3)  # fmt: skip
    left.set(xlim=(0, 1100), ylim=(0, 1.25), xlabel="programs", ylabel="share of the slots at work")
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    d.above(left, "by formula: n / (slots × ⌈n / slots⌉)")
    d.legend(left, "upper right")
    right.set(xlim=(0, 1100), ylim=(0, 3.6), xlabel="programs (128 a head)", ylabel="time (ms)")
    d.above(right, "lines: waves by formula; points: recorded")
    d.legend(right)
    d.plain(left)
    d.plain(right)
    return (
        "Time goes up in steps: one program more than fits can cost a whole wave",
        "NVIDIA H200 (132 multiprocessors). Recorded: data/runs/loop-orders-h200, version 2 with "
        "tiles of 128 x 64, bfloat16, 16,384 tokens, no mask, 1, 2, 4 and 8 heads.\n"
        "No point was recorded just after a step; each line's height is that of one point.",
    )


@d.picture("performance-predicted.png", (10.2, 5.0), 1, 2, sharey=True)
def predicted(panels):
    """Predicted over measured times of the shapes that were held out, two runs."""
    handles = {}
    for axes, run in zip(panels, ("attention-h200", "peers-h200"), strict=True):
        model, held_out = calibrate_run(run)
        table = with_predictions(held_out, model)
        factor = math.exp(NINETY_PERCENT * model.spread)
        axes.axhspan(1 / factor, factor, color="#dddddd", zorder=0)
        axes.axhline(1, color=d.GREY, linewidth=1.2, zorder=1)
        for backend in dict.fromkeys(table.backend):
            colour, marker = style(backend)
            handles[backend] = panels[0].plot([], [], marker, color=colour, markersize=6.5)[0]
            for direction, filled in DIRECTIONS:
                rows = table[(table.backend == backend) & (table.direction == direction)]
                _points(axes, rows.ms, rows.predicted_ms / rows.ms, backend, filled, 6.5)
        text = f"{run}: mean error {table.error.abs().mean():.1%},\n{table.covered.mean():.0%} of "
        d.above(axes, text + f"{len(table)} cases inside the grey interval")
        ticks = [0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4]
        axes.set(xscale="log", yscale="log", ylim=(0.68, 1.47), xlabel="measured (ms)")
        axes.set_yticks(ticks, [f"{y:g}" for y in ticks])
        axes.set_yticks([], minor=True)
        d.plain(axes)
    panels[0].set_ylabel("predicted / measured")
    where = {"loc": "outside right center", "frameon": False, "fontsize": 9}
    panels[0].figure.legend(list(handles.values()), list(handles), **where)
    return (
        "Held-out shapes: most within a few percent; the large errors are mostly short calls",
        "NVIDIA H200, bfloat16; lengths that no weight was fitted to (labsupport.analysis.predictor"
        "). Filled: forward; hollow: with the backward.\nLeft: calls from Python, "
        "head_dim 64. Right: kernels replayed from a CUDA graph, head_dim 64 and 128.",
    )


@d.picture("performance-noise.png", (9.2, 4.4))
def noise(axes):
    """One unchanged call on a busy machine: its time, and its ratio to a reference in turns."""
    table = load_run("noise-cpu-busy")
    table = table[table["case"] == "short"].assign(ratio=lambda t: t.case_ms / t.reference_ms)
    each = table.groupby("process").median(numeric_only=True)
    for column, label, colour, marker in (
        ("case_ms", "time of the call", d.RED, "s"),
        ("ratio", "time over the reference's, in turns", d.BLUE, "o"),
    ):
        values = each[column] / each[column].median()
        axes.plot(each.started_s / 60, values, "-", marker=marker, color=colour, markersize=4.5,
                  linewidth=1.2, label=label)  # fmt: skip
    d.hline(axes, 1.05, "5% slower", each.started_s.max() / 60, 1.055 / 1.05, 9, ha="right",
            va="baseline")  # fmt: skip
    axes.set(xlabel="minutes since the run began", ylabel="over its own median")
    d.plain(axes)
    d.legend(axes, "upper right")
    return (
        "The program did not change; the machine did",
        "data/runs/noise-cpu-busy: the call of 3 ms (sdpa_flash, 512 tokens, 4 heads, float32) on "
        "two cores of an AMD EPYC beside other programs;\na point is the median of 41 pairs in one "
        "fresh process.",
    )
