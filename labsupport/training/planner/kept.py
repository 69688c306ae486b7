"""What a block keeps for its backward pass.

To find these, ask each operation what its derivative needs. A linear layer's needs its input; a sum
needs nothing; a norm needs its input, GELU its input, a product both factors, softmax its result;
FlashAttention needs Q, K, V, O and one number for each row. A rotation is linear in its input, and
needs the angles alone. So a block in GPT-2's shape keeps, of each token,

    x -> norm -> Q, K, V -> O -> x' = x + ... -> norm -> up -> gelu -> x'' = x' + ...
    w    w       3w         w    w               w       4w    4w                    (16 w)

The next block counts x''. Textbook attention also keeps P, which has N² entries a head.
"""

from __future__ import annotations

from labsupport.training.planner.devices import kept_by_norm
from labsupport.training.planner.shape import Part, Shape

# The parts' names; moments of the same step share them.
NORMS = "norms' outputs"
STREAM = "residual stream"
QKV = "queries, keys, values"
SCORES = "attention's scores (P)"
OUTPUT = "attention's output"
MLP = "inside the MLP"


def kept_by_blocks(shape: Shape, *, with_mlp: bool = True) -> list[Part]:
    """What the blocks that are still to go through the backward pass keep.

    Args:
        shape: `shape.kept_blocks` of them.
        with_mlp: False when the first of them is through its MLP already.
    """
    if shape.savings.checkpoint:
        # Each block's input; of one block all that is kept, computed again.
        return [
            shape.part(STREAM, "K·T·w·r", *(["T·w·r"] if with_mlp else [])),
            *_inside(shape, "1", "1" if with_mlp else "0"),
        ]
    mlps = "K" if with_mlp else "(K-1)"
    return [shape.part(STREAM, "K·T·w·r", f"{mlps}·T·w·r"), *_inside(shape, "K", mlps)]


def _inside(shape: Shape, attentions: str, mlps: str) -> list[Part]:
    beside_norm = " + ".join(kept_by_norm(shape))
    norms = [f"{attentions}·T·(w·c + {beside_norm})"]
    inner = []
    if not shape.chunked_mlp:  # else the MLP and its norm are computed again, chunk by chunk
        norms.append(f"{mlps}·T·(w·c + {beside_norm})")
        inner.append(f"{mlps}·T·{hidden_tensors(shape)}·I·c")
    return [
        shape.part(NORMS, *norms),
        shape.part(QKV, f"{attentions}·T·{_heads_kept(shape)}·d·c"),
        *_scores(shape, attentions),
        shape.part(OUTPUT, f"{attentions}·T·w·c", *_log_sum_exp(shape, attentions)),
        shape.part(MLP, *inner),
    ]


def hidden_tensors(shape: Shape) -> int:
    """Tensors of the MLP's width that it keeps: GELU's two sides, or SwiGLU's four factors."""
    return 4 if shape.config.mlp == "swiglu" else 2


def _heads_kept(shape: Shape) -> str:
    # The textbook's matrix product wants K and V of every query head: it makes copies.
    return "3·H" if shape.textbook else "(H + 2·G)"


def _scores(shape: Shape, blocks: str) -> list[Part]:
    # P, and one byte an entry for the causal mask.
    return [shape.part(SCORES, f"{blocks}·B·H·N²·c", f"{blocks}·N²")] if shape.textbook else []


def _log_sum_exp(shape: Shape, blocks: str) -> list[str]:
    return [] if shape.textbook else [f"{blocks}·T·H·4"]
