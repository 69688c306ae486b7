"""The figures of notebooks 1 and 2: a tile and its row, layouts, and attention inside a model."""

import _draw as d
import pandas

from labsupport.profiling import load_run


@d.picture("model-gain.png", (8.6, 4.4))
def model_gain(axes):
    """Time of a whole model against the length of its text, by attention."""
    run = load_run("smollm2-cpu")
    seconds = run.pivot(index="seqlen", columns="backend", values="median_ms") / 1000
    labels = {"eager": (d.BLACK, "textbook"), "flash": (d.BLUE, "FlashAttention")}
    for name, (colour, label) in labels.items():
        axes.plot(seconds.index, seconds[name], color=colour, marker="o", linewidth=2.2)
        last = seconds.index[-1], seconds[name].iloc[-1]
        d.note(axes, label, last, (8, -3), 10, colour)
    for length, row in seconds.iterrows():
        d.note(axes, f"{row.eager / row.flash:.1f} ×", (length, row.eager), (0, 9), ha="center")
    ticks = list(seconds.index)
    d.log(axes, y=[1, 10, 100], ylabel="time to read the text (s)", ylim=(1, 400))
    d.log2_axis(axes, ticks, "tokens (1K = 1024)")
    axes.set_xlim(ticks[0] * 0.85, ticks[-1] * 1.9)
    d.plain(axes)
    gain = seconds.eager.iloc[-1] / seconds.flash.iloc[-1]
    record = run.attrs["provenance"]
    return (
        f"The same model, the same answers: {gain:.1f} times as fast at {ticks[-1]:,} tokens",
        f"SmolLM2-135M, float32, one text, forward; {record['device']}, {record['date'][:10]} "
        "(data/runs/smollm2-cpu)",
    )


@d.picture("configurations.png", (8.6, 4.4))
def configurations(axes):
    """FlashAttention's gain over the textbook, alone, when one property of a call changes."""
    run = load_run("calibration-cpu")
    base = {"batch": 1, "heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "float32",
            "causal": True, "direction": "forward", "seqlen": 1024}  # fmt: skip
    changes = {
        "4 heads of 64, 1,024 tokens, causal": {},
        "2,048 tokens": {"seqlen": 2048},
        "a batch of 2": {"batch": 2},
        "8 heads that share 2 of keys": {"heads": 8, "kv_heads": 2},
        "with the backward pass": {"direction": "forward+backward"},
        "head_dim 128": {"head_dim": 128},
        "not causal": {"causal": False},
        "bfloat16": {"dtype": "bfloat16"},
    }
    gains = []
    for change in changes.values():
        wanted = pandas.Series(base | change)
        rows = run[(run[list(wanted.index)] == wanted).all(axis=1)].set_index("backend")
        gains.append(rows.median_ms["standard"] / rows.median_ms["sdpa_flash"])
    colours = [d.BLACK] + [d.BLUE if gain >= gains[0] else d.ORANGE for gain in gains[1:]]
    axes.barh(range(len(gains)), gains, color=colours, height=0.62)
    for row, gain in enumerate(gains):
        d.words(axes, gain + 0.05, row, f"{gain:.1f} ×", 9, "black", va="center")
    axes.set_yticks(range(len(gains)), list(changes))
    axes.invert_yaxis()
    axes.axvline(1, color=d.GREY, linestyle=":")
    axes.set(xlim=(0, max(gains) * 1.12), xlabel="FlashAttention, times as fast as the textbook")
    axes.tick_params(axis="y", length=0)
    d.plain(axes, "x")
    record = run.attrs["provenance"]
    return (
        f"The gain depends on the call: from {min(gains):.1f} to {max(gains):.1f} times as fast",
        "Attention alone, sdpa_flash against standard, float32 but for the last row, one thread; "
        f"{record['device']}, {record['date'][:10]}\n(data/runs/calibration-cpu)",
    )


HEADS, TOKENS = (d.BLUE, d.GREEN), 3


@d.picture("layouts.png", (9.6, 3.6), 1, 2)
def layouts(panels):
    """Three tokens with two heads: by tokens, and by heads; each number's place in memory."""
    titles = (
        "flash-attn: (batch, seqlen, heads, head_dim)",
        "SDPA: (batch, heads, seqlen, head_dim)",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlim=(-1.3, 6.2), ylim=(3.1, -0.4), aspect="equal")
        axes.axis("off")
        d.above(axes, title)
    for head, colour in enumerate(HEADS):
        for token in range(TOKENS):
            for x in range(2):
                place = str(4 * token + 2 * head + x)
                d.box(panels[0], 2.3 * head + x, token, colour, place)
                d.box(panels[1], token * 2.1 + x, 1.5 * head, colour, place)
        d.words(panels[0], 2.3 * head + 0.5, -0.15, f"head {head}", 8.5)
        d.words(panels[1], -1.2, 1.5 * head + 0.6, f"head {head}", 8.5)
    for token in range(TOKENS):
        d.words(panels[0], -1.2, token + 0.6, f"token {token}", 8.5)
        d.words(panels[1], token * 2.1 + 0.5, -0.15, f"token {token}", 8.5)
    return (
        "Two layouts of the same numbers: transpose exchanges the axes, and nothing moves",
        "Numbers: places in memory, as a projection wrote them (3 tokens, 2 heads of 2)",
    )


@d.picture("row-and-tile.png", (9.6, 2.5))
def row_and_tile(axes):
    """One row of P and dP, of which a tile is a part; and the rows of dO and O, in full."""
    axes.set(xlim=(-1.4, 15.2), ylim=(3.1, -0.9), aspect="equal")
    axes.axis("off")
    for y, name in ((0, "P"), (1.2, "dP")):
        d.words(axes, -1.3, y + 0.62, f"row of {name}", 8.5)
        for x in range(8):
            d.box(axes, x + 0.6, y, d.TILE if x in (2, 3) else d.PALE)
        d.words(axes, 10.2, y + 0.62, f"row of {'dO' if y else 'O'}", 8.5)
        for x in range(3):
            d.box(axes, x + 12, y, d.GREEN)
    d.words(axes, 3.6, -0.2, "this tile", 8.5, ha="center")
    d.words(axes, 4.6, 2.7, "D needs all eight products", 9, "black", ha="center")
    d.words(axes, 13.5, 2.7, "there in full", 9, "black", ha="center")
    return (
        "A tile has only a part of the sum that makes D",
        "One query: its row has one number for each key, and head_dim numbers in O and dO",
    )


@d.picture("attention-table.png", (9.6, 3.3))
def attention_table(axes):
    """A model's layers call the function that the configuration names."""
    axes.set(xlim=(0, 17), ylim=(5.2, -0.2), aspect="equal")
    axes.axis("off")
    for y in range(4):
        d.box(axes, 0, 0.2 + 1.2 * y, d.TILE, f"attention layer {y}" if y < 3 else "…", 3.2)
    names = {"eager": d.PALE, "sdpa": d.PALE, "…": d.PALE, "mine": d.GREEN}
    for y, (name, colour) in enumerate(names.items()):
        d.box(axes, 13.4, 0.2 + 1.2 * y, colour, name, 3.2)
    d.arrow(axes, (3.5, 1.9), (13.2, 4.1))
    d.arrow(axes, (13.2, 4.5), (3.5, 2.25))
    d.words(axes, 8.4, 1.5, "query, key, value: (batch, heads, seqlen, head_dim)", ha="center")
    d.words(axes, 8.4, 0.3, 'set_attn_implementation("mine")', 10, "black", ha="center")
    d.words(axes, 7.2, 4.9, "output: (batch, seqlen, heads, head_dim), and None", ha="center")
    return (
        "Each layer calls the function that the configuration names",
        "Transformers' table of attention functions; the weights stay in the layers",
    )


@d.picture("padding.png", (9.6, 2.9), 1, 2)
def padding(panels):
    """A batch of two prompts, with what the last token of the short one sees."""
    words = ["The", "capital", "of", "Italy", "is"]
    titles = {"no mask: it looks at the padding": d.RED, "padding cut out": d.GREEN}
    for axes, (title, colour) in zip(panels, titles.items(), strict=True):
        axes.set(xlim=(-0.1, 9.1), ylim=(2.8, -1.9), aspect="equal")
        axes.axis("off")
        d.above(axes, title)
        for x in range(9):
            seen = colour == d.RED or x >= 4
            look = d.PALE if x < 4 else d.TILE
            d.box(axes, x, 0, look, "pad" if x < 4 else words[x - 4])
            d.box(axes, x, 1.6, d.TILE, "…" if x else "Once")
            if seen and x < 8:
                arc = {"arrowstyle": "-|>", "color": colour, "connectionstyle": "arc3,rad=0.35"}
                axes.annotate("", (x + 0.5, 0), (8.5, 0), arrowprops=arc)
    return (
        "What the last token of the short prompt sees",
        "A batch of two prompts; the short one is filled up on its left",
    )


@d.picture("prefill-decode.png", (10.2, 4.2), 1, 2)
def prefill_decode(panels):
    """Scores of the prefill, a triangle, and of two decode steps, a row each; and the cache."""
    prompt, steps = 5, 2
    prefill, decode = panels
    titles = "prefill: 5 queries, 5 keys, once", "decode: 1 query, all keys so far; once a token"
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlim=(-1.9, 7.2), ylim=(8.6, -0.4), aspect="equal")
        axes.axis("off")
        d.above(axes, title)
    for row in range(prompt):
        d.box(prefill, -1.5, row, d.BLUE, f"q{row + 1}")
        for key in range(prompt):
            d.box(prefill, key, row, d.TILE if key <= row else d.PALE)
    for step in range(steps):
        row, seen = 2.2 * step + 0.4, prompt + step + 1
        d.box(decode, -1.5, row, d.BLUE, f"q{seen}")
        for key in range(seen):
            d.box(decode, key, row, d.TILE)
    for axes, count in ((prefill, prompt), (decode, prompt + steps)):
        for key in range(count):
            new = axes is prefill or key >= prompt
            d.box(axes, key, 6.2, d.GREEN if new else d.ORANGE, f"k{key + 1}\nv{key + 1}")
        d.words(axes, -1.85, 6.85, "KV cache", 8)
    labels = {d.BLUE: "queries", d.TILE: "scores", d.PALE: "hidden"}
    labels |= {d.GREEN: "written to the cache", d.ORANGE: "read from it"}
    d.keys(prefill, labels, "lower left", 8.5, ncols=5).set_in_layout(False)
    return (
        "Prefill computes a triangle of scores, each decode step one row",
        "A prompt of 5 tokens, then 2 new ones; one head",
    )
