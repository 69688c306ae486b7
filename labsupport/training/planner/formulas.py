"""The parts of memory at each phase of a training step.

A formula is a text, and its value is computed from it: what is printed is what was added up.

    T = B · N   tokens of a batch of B sequences of N     L   blocks
    w           width of the residual stream              V   vocabulary
    H, G, d     query heads, key/value heads, head_dim    I   width inside the MLP
    c           bytes of a number in matrix products (autocast's dtype; else 4)
    r           bytes of a number in the residual stream (`MemoryOptions.residual`; else 4)
    W           weights in the model; Wb in a block, Wm of these in its MLP
    C, M        tokens at a time through the classifier (loss_chunk), through the MLP (mlp_chunk)
    h, g        query heads, key/value heads at a time (head_chunk)
    K           blocks whose tensors still exist: L when the backward pass begins, then fewer

What a block keeps for its backward pass follows from its derivatives: theory/07-long-context.md. A
block in GPT-2's shape keeps, of each token,

    x -> norm -> Q, K, V -> O -> x' = x + ... -> norm -> up -> gelu -> x'' = x' + ...
    w    w       3w         w    w               w       4w    4w                    (16 w)

WHAT EXISTS AT THE SAME TIME, at each phase that may be the peak:

    forward      weights, AdamW's states, and a growing heap of what blocks keep
    loss         all of that heap, and the logits                                      <- a peak?
    backward     the heap shrinks block by block, gradients of weights grow: the most  <- a peak?
                 is there at its beginning or at its end, in a block's MLP or attention
    optimizer    weights, states, gradients                                            <- a peak?

WHAT A CPU AND A GPU DO DIFFERENTLY:

                       CPU                                  GPU (CUDA)
    LayerNorm          a 16-bit x: in float32, too          one kernel: keeps x
    RMSNorm            several operations: keeps x / rms    one kernel: keeps x and a number a token
                       too (a 16-bit x: in float32, and
                       x in float32)
    attention's        dQ, dK, dV, and tiles of S and dS    dQ, dK, dV, and dQ once more in float32,
    backward           for each thread                      where tiles are added up; with grouped
                                                            heads dK, dV for each query head first
    chunked loss       adds to the weight's gradient        makes each chunk's part of it first
                       in place
    libraries          (not counted by the allocator)       cuBLAS: workspaces, taken once

The GPU's column follows from how the kernels work; it was not fitted to a measurement. cuDNN and
FlexAttention are taken for FlashAttention-2. The allocator's rounding and fragments, and CUDA's
context, are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from labsupport.training.chunked_loss import default_chunk
from labsupport.training.config import DecoderConfig, MemoryOptions

# Names of the parts; phases of the same step share them.
WEIGHTS, STATES = "weights", "AdamW's states"
GRADIENTS, COPIES = "gradients of weights", "weights in autocast's dtype"
LOGITS, TEMPORARY = "logits and their loss", "temporaries"
FIXED = "tokens, angles, workspaces"
NORMS, STREAM = "norms' outputs", "residual stream"
QKV, SCORES, OUTPUT = "queries, keys, values", "attention's scores (P)", "attention's output"
MLP = "inside the MLP"


@dataclass(frozen=True)
class Part:
    """One part of memory: its name, the formula, and the formula's value in bytes."""

    name: str
    formula: str
    bytes: int


@dataclass(frozen=True)
class StepMemory:
    """A training step, with the arguments of `plan_memory`; `blocks` is K."""

    config: DecoderConfig
    savings: MemoryOptions
    seqlen: int
    batch: int
    autocast: torch.dtype | None
    device: str
    blocks: int = 0

    def part(self, name: str, *terms: str) -> Part:
        """Return a part whose bytes are the sum of the terms."""
        formula = " + ".join(t.removeprefix("1·") for t in terms if not t.startswith("0·")) or "0"
        python = formula.replace("·", "*").replace("²", "**2")
        allowed = {"__builtins__": {}, "max": max}
        return Part(name, formula, eval(python, allowed, dict(self.symbols)))

    def phases(self) -> dict[str, list[Part]]:
        """Return the parts of each phase, by the phase's name, in the order of time."""
        last, first = replace(self, blocks=self.config.layers), replace(self, blocks=1)
        found = {
            "loss, forward": last._loss_forward(),
            "loss, backward": last._loss_backward(),
            "last block's backward, MLP": last._mlp_backward(),
            "last block's backward, attention": last._attention_backward(),
            "first block's backward, MLP": first._mlp_backward(),
            "first block's backward, attention": first._attention_backward(),
            "embedding's backward": self._embedding_backward(),
        }
        found["optimizer"] = [self.part(GRADIENTS, "W·4")]
        always = [self.part(WEIGHTS, "W·4"), self.part(STATES, "2·W·4")]
        fixed = ["2·T·8", *(["N·d·4"] if self.config.positions == "rotary" else [])]
        if not self.cpu:
            # cuBLAS's default on Hopper is 32 MiB for each thread that calls it, elsewhere about
            # 8: the program and autograd's thread make two.
            new = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
            fixed.append("2·32·1024²" if new else "2·8·1024²")
        always.append(self.part(FIXED, *fixed))
        if self.cpu and self.savings.offload and self.savings.head_chunk is not None:
            always.append(self.part("attention's results", "L·T·w·c", "L·T·H·4"))
        return {name: [*always, *(p for p in parts if p.bytes)] for name, parts in found.items()}

    # --- what blocks keep -------------------------------------------------------------------------

    def kept_by_blocks(self, *, with_mlp: bool = True) -> list[Part]:
        """Return what K blocks keep; without `with_mlp`, the first is through its MLP already."""
        if self.savings.checkpoint:
            # Each block's input; of one block all that is kept, computed again.
            attentions, mlps = "1", "1" if with_mlp else "0"
            stream = [f"{self._inputs}·T·w·r", *(["T·w·r"] if with_mlp else [])]
        else:
            attentions, mlps = "K", "K" if with_mlp else "(K-1)"
            stream = ["K·T·w·r", f"{mlps}·T·w·r"]
        norms, inner = [f"{attentions}·T·(w·c + {self._by_norm})"], []
        if not self.chunked_mlp:  # else the MLP and its norm are computed again, chunk by chunk
            norms.append(f"{mlps}·T·(w·c + {self._by_norm})")
            inner.append(f"{mlps}·T·{self._wide_tensors}·I·c")
        # The textbook's matrix product wants K and V of every query head: it makes copies. It keeps
        # P, and one byte an entry for the causal mask; the others keep the log-sum-exp.
        heads, scores, lse = "(H + 2·G)", [], [f"{attentions}·T·H·4"]
        if self.savings.head_chunk is not None:  # computed again, a few heads at a time
            return [
                self.part(STREAM, *stream),
                self.part(NORMS, *norms[1:]),
                self.part(OUTPUT, f"{mlps}·T·w·c"),
                self.part(MLP, *inner),
            ]
        if self.textbook:
            heads, lse = "3·H", []
            scores = [self.part(SCORES, f"{attentions}·B·H·N²·c", f"{attentions}·N²")]
        return [
            self.part(STREAM, *stream),
            self.part(NORMS, *norms),
            self.part(QKV, f"{attentions}·T·{heads}·d·c"),
            *scores,
            self.part(OUTPUT, f"{attentions}·T·w·c", *lse),
            self.part(MLP, *inner),
        ]

    def kept_until_loss(self) -> list[Part]:
        """Return what blocks keep, and the stream after the last of them with its norm."""
        last = self.part("last norm", f"T·(w·r + w·c + {self._by_norm})")
        if self.savings.checkpoint:
            return [self.part(STREAM, f"{self._inputs}·T·w·r"), last]
        return [*self.kept_by_blocks(), last]

    @property
    def _inputs(self) -> str:
        """Inputs of blocks on the device: all; or the one in use, and perhaps one on its way."""
        if not self.savings.offload or self.blocks < 2:
            return "K"
        if self.cpu:  # the host's memory
            return "L"
        return "2" if self.savings.head_chunk is None else "1"

    @property
    def _block_copies(self) -> list[str]:
        """Autocast's copies of the weights of blocks: of one at a time, if they are made again."""
        return (["Wb·c"] if self.savings.checkpoint else ["K·Wb·c"]) if self.low else []

    @property
    def _by_norm(self) -> str:
        """Bytes that a norm keeps for each token, beside its input and output."""
        if self.config.norm == "layer":
            copied = self.cpu and self.symbols["r"] == 2
            return "8 + w·4" if copied else "8"  # mean and 1 / deviation, in float32
        if not self.cpu:
            return "4"
        return "4 + w·4" if self.symbols["r"] == 4 else "4 + 2·w·4"

    @property
    def _wide_tensors(self) -> int:
        """Tensors of the MLP's width that it keeps: GELU's two sides, or SwiGLU's four factors."""
        return 4 if self.config.mlp == "swiglu" else 2

    # --- phases -----------------------------------------------------------------------------------

    def _loss_forward(self) -> list[Part]:
        # Autocast makes a copy of a weight once, and keeps it as long as the forward pass lasts.
        copies = ["L·Wb·c", "V·w·c"] if self.low else []
        logits = ["V·c", "V·4"] if self.low else ["V·4"]
        if self.savings.loss_chunk is None:
            # Logits, in float32 if they are not, and their log-softmax.
            logits = [f"T·{each}" for each in (*logits, "V·4")]
        else:
            # The gradients of the hidden states and of the classifier are made already.
            logits = [*(f"C·{each}" for each in logits), "T·w·c", "V·w·4"]
            logits += ["V·w·4"] if self.low and not self.cpu else []  # one chunk's part of it
        return self._at_the_loss(copies, logits)

    def _loss_backward(self) -> list[Part]:
        # Those that the graph has saved: none of blocks that will be computed again.
        copies = ["L·Wb·c"] if self.low and not self.savings.checkpoint else []
        if self.savings.loss_chunk is not None:
            logits = ["T·w·c", "V·w·4"]
        else:
            logits = ["3·T·V·4"]  # log-softmax, the gradient of it, and the gradient of the logits
            copies += ["V·w·c"] if self.low else []
        return self._at_the_loss(copies, logits)

    def _at_the_loss(self, copies: list[str], logits: list[str]) -> list[Part]:
        return [
            *self.kept_until_loss(),
            *self._gradients(),
            self.part(COPIES, *copies),
            self.part(LOGITS, *logits),
        ]

    def _mlp_backward(self) -> list[Part]:
        cast = ["T·w·c"] if self.symbols["r"] != self.symbols["c"] else []
        # GELU: that of its output (its own takes the place of its output's). SwiGLU: both factors'.
        gradients = 2 if self.config.mlp == "swiglu" else 1
        if self.chunked_mlp:
            # The chunks' gradients; besides, the tensors of one chunk, or, when all chunks are
            # done, their gradients put together.
            inner = self._wide_tensors + gradients
            one_chunk = " + ".join([f"M·(w·c + {self._by_norm} + {inner}·I·c)", *cast])
            temporary = ["T·w·r", f"max({one_chunk}, T·w·r)"]
        else:
            temporary = [f"{gradients}·T·I·c", *cast]
        return [
            *self.kept_by_blocks(),
            *self._gradients("(L-K)·Wb", "V·w", "w·I"),  # the MLP's last matrix already
            self.part(COPIES, *self._block_copies),
            self.part(TEMPORARY, "T·w·r", *temporary),
        ]

    def _attention_backward(self) -> list[Part]:
        temporary, stream = self._attention_temporaries(), "T·w·r"
        if self.savings.head_chunk is not None:
            # A group computed again (its q, k, v are parts of one tensor; rotary positions make new
            # q and k), its output's gradient as one block, and its temporaries; or its gradients,
            # and those of x: the chunks', and put together.
            temporary = [each.replace("H", "h").replace("G", "g") for each in temporary]
            turned = "T·(h + g)·d·c" if self.config.positions == "rotary" else "0"
            group = ["T·(h + 2·g)·d·c", turned, "2·T·h·d·c", "T·h·4", *temporary]
            temporary = [f"max({' + '.join(group)}, T·((h + 2·g)·d·c + w·r), 2·T·w·r)"]
            stream = "T·w·4"  # the groups' contributions are added up in float32
        return [
            *self.kept_by_blocks(with_mlp=False),
            *self._gradients("(L-K)·Wb", "V·w", "Wm"),
            self.part(COPIES, *self._block_copies),
            # The gradient of the stream, and of attention's output.
            self.part(TEMPORARY, stream, "T·w·c", *temporary),
        ]

    def _attention_temporaries(self) -> list[str]:
        """Return the backward's temporaries, the gradients of q, k and v included."""
        if self.textbook:
            return ["2·B·H·N²·c", "T·H·d·c"]  # dP, dS; dV
        if self.cpu:
            # PyTorch's CPU kernel: blocks of 256 queries (64 or 32 where there are few) by 512
            # keys; S and dS in float32, and once more for 16-bit products, in each thread.
            sizes = ((768, 256), (192, 64), (0, 32))
            rows = next(size for least, size in sizes if self.seqlen >= least)
            each = "(4 + c)" if self.low else "4"
            tiles = f"{torch.get_num_threads()}·2·{rows}·{min(512, self.seqlen)}·{each}"
            return ["T·(H + 2·G)·d·c", tiles]
        grouped = ["2·T·H·d·c"] if self.config.key_heads < self.config.heads else []
        return ["T·(H + 2·G)·d·c", "T·H·d·4", "2·T·H·4", *grouped]

    def _embedding_backward(self) -> list[Part]:
        temporary = ["T·w·4"]
        if self.config.tied:
            temporary.append("V·w·4")  # until it is added to the classifier's
        if self.config.tied and not self.low and self.savings.loss_chunk is None:
            temporary.append("V·w·4")  # the sum is a third tensor
        return [self.part(GRADIENTS, "W·4"), self.part(TEMPORARY, *temporary)]

    def _gradients(self, *so_far: str) -> list[Part]:
        return [self.part(GRADIENTS, *(f"{weights}·4" for weights in so_far))]

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def cpu(self) -> bool:
        """True if the device is a CPU."""
        return self.device == "cpu"

    @property
    def low(self) -> bool:
        """True if matrix products are in 16 bits, by autocast."""
        return self.autocast is not None

    @property
    def textbook(self) -> bool:
        """True if S and P are stored."""
        return self.savings.attention == "standard"

    @property
    def chunked_mlp(self) -> bool:
        """True if the MLP is cut: not if the sequence is no longer than a chunk."""
        return self.savings.mlp_chunk is not None and self.savings.mlp_chunk < self.seqlen

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """The letters of the formulas."""
        config, savings = self.config, self.savings
        weights, tokens = config.parameters_by_part, self.batch * self.seqlen
        keys = min(savings.head_chunk or config.key_heads, config.key_heads)
        return {
            "T": tokens,
            "B": self.batch,
            "N": self.seqlen,
            "h": keys * (config.heads // config.key_heads),
            "g": keys,
            "L": config.layers,
            "w": config.width,
            "H": config.heads,
            "G": config.key_heads,
            "d": config.head_dim,
            "I": config.inner_width,
            "V": config.vocab_size,
            "c": self.autocast.itemsize if self.autocast else 4,
            "r": savings.residual.itemsize if savings.residual else 4,
            "W": config.parameters,
            "Wb": weights["attention"] + weights["mlp"],
            "Wm": weights["mlp"],
            "C": min(savings.loss_chunk or default_chunk(config.vocab_size), tokens),
            "M": self.batch * min(savings.mlp_chunk or self.seqlen, self.seqlen),
            "K": self.blocks,
        }
