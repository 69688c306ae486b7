"""llama2.c's checkpoints, version 0, as Transformers' Llama models, and back.

A file is 28 bytes of header and then nothing but float32 numbers, little-endian, in this order
(Andrej Karpathy, llama2.c: `memory_map_weights` in run.c and `legacy_export` in export.py):

    header    7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len;
              a negative vocab_size says that the classifier has weights of its own
    weights   token embeddings, then of all layers together: attention norms, wq, wk, wv, wo,
              feed-forward norms, w1, w2, w3; then the final norm
    tables    cosines and sines of RoPE, (seq_len, head_dim / 2) each; run.c skips them now
    wcls      the classifier, if it has weights of its own

The numbers of a head's queries and keys stand in another order than Transformers wants. RoPE turns
pairs of them, as the coordinates (x, y) of a point, by an angle that grows with the position; the
two programs disagree about who is a pair. With a head_dim of 8, pairs a to d:

    llama2.c       xa ya xb yb xc yc xd yd      neighbours: rows 2i and 2i + 1
    Transformers   xa xb xc xd ya yb yc yd      half a head apart: rows i and i + head_dim / 2

Queries and keys are permuted alike, so their dot products, and with them the scores, stay what
they were. What must move are the rows of wq and wk that make them: to Transformers, the even rows
of a head first and then the odd ones. Values are not turned, so wv and wo stay as they are.
Forgetting it gives no error, only a model that talks nonsense.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# What run.c has no number for in the file.
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
# Where a model that was read keeps the file's tables, so that they can be written back.
TABLES = "llama2c_rope_tables"
_MAGIC_OF_LATER_VERSIONS = 0x616B3432  # "ak42"


@dataclass(frozen=True)
class Header:
    """The sizes in front of the weights, and whether the classifier is the embedding again."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared_classifier: bool = True

    @property
    def head_dim(self) -> int:
        """Numbers in a head."""
        return self.dim // self.n_heads

    @property
    def file_size(self) -> int:
        """Bytes of a whole file."""
        return 28 + 4 * sum(math.prod(shape) for _, shape in tensors(self))

    def check(self, origin: str) -> None:
        """Raise ValueError if no model can have these sizes."""
        sizes = dict(zip(_FIELDS, astuple(self), strict=False))
        if sizes["dim"] == _MAGIC_OF_LATER_VERSIONS:
            raise ValueError(f"{origin} is a llama2.c file of version 1 or 2; only 0 is read here")
        wrong = [f"{name} = {size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise ValueError(
                f"{origin} is no llama2.c checkpoint: {', '.join(wrong)} in its header"
            )
        if self.dim % self.n_heads or self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{origin} is no llama2.c checkpoint: dim {self.dim} must be a multiple of n_heads "
                f"{self.n_heads}, with an even number for each head, and n_heads a multiple of "
                f"n_kv_heads {self.n_kv_heads}"
            )


_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


def tensors(header: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor of a file, in order: Transformers' name (with {} for the layer) and its shape."""
    h = header
    layers, kv_dim = h.n_layers, h.n_kv_heads * h.head_dim
    block = "model.layers.{}"
    yield "model.embed_tokens.weight", (h.vocab_size, h.dim)
    yield f"{block}.input_layernorm.weight", (layers, h.dim)
    yield f"{block}.self_attn.q_proj.weight", (layers, h.dim, h.dim)
    yield f"{block}.self_attn.k_proj.weight", (layers, kv_dim, h.dim)
    yield f"{block}.self_attn.v_proj.weight", (layers, kv_dim, h.dim)
    yield f"{block}.self_attn.o_proj.weight", (layers, h.dim, h.dim)
    yield f"{block}.post_attention_layernorm.weight", (layers, h.dim)
    yield f"{block}.mlp.gate_proj.weight", (layers, h.hidden_dim, h.dim)  # w1
    yield f"{block}.mlp.down_proj.weight", (layers, h.dim, h.hidden_dim)  # w2
    yield f"{block}.mlp.up_proj.weight", (layers, h.hidden_dim, h.dim)  # w3
    yield "model.norm.weight", (h.dim,)
    yield TABLES, (2, h.seq_len, h.head_dim // 2)
    if not h.shared_classifier:
        yield "lm_head.weight", (h.vocab_size, h.dim)


def read_header(file: IO[bytes]) -> Header:
    """The header at the beginning of an open file.

    Raises:
        ValueError: the file is too short, or its numbers cannot belong together.
    """
    origin, raw = getattr(file, "name", "the file"), file.read(28)
    if len(raw) < 28:
        raise ValueError(f"{origin} is no llama2.c checkpoint: {len(raw)} bytes, no header of 28")
    sizes = dict(zip(_FIELDS, struct.unpack("<7i", raw), strict=True))
    shared = sizes["vocab_size"] > 0
    sizes["vocab_size"] = abs(sizes["vocab_size"])
    header = Header(**sizes, shared_classifier=shared)
    header.check(str(origin))
    return header


def read_checkpoint(path: str | Path) -> LlamaForCausalLM:
    """A model in eval mode, float32, on the CPU, with SDPA attention.

    RoPE's tables are not used, as in run.c; they are kept for `write_checkpoint`.

    Raises:
        ValueError: not a version 0 checkpoint; sizes that cannot be; a file that is longer or
            shorter than its header says. Found before memory is taken.
        FileNotFoundError: there is no such file.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    path = Path(path)
    with path.open("rb") as file:
        header = read_header(file)
        length = os.fstat(file.fileno()).st_size
        if length != header.file_size:
            wrong = "is cut off" if length < header.file_size else "goes on after its end"
            raise ValueError(
                f"{path} has {length:,} bytes, but its header ({_describe(header)}) asks for "
                f"{header.file_size:,}: it {wrong}, or is no llama2.c checkpoint of version 0"
            )
        state: dict[str, Tensor] = {}
        for name, shape in tensors(header):
            numbers = np.fromfile(file, dtype="<f4", count=math.prod(shape))
            tensor = torch.from_numpy(numbers.astype(np.float32, copy=False)).view(shape)
            if "{}" in name:
                state.update((name.format(layer), one) for layer, one in enumerate(tensor))
            else:
                state[name] = tensor
    tables = state.pop(TABLES)
    for name in state:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = halves_from_neighbours(state[name], header.head_dim)
    if header.shared_classifier:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=header.vocab_size,
        hidden_size=header.dim,
        intermediate_size=header.hidden_dim,
        num_hidden_layers=header.n_layers,
        num_attention_heads=header.n_heads,
        num_key_value_heads=header.n_kv_heads,
        head_dim=header.head_dim,
        max_position_embeddings=header.seq_len,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=header.shared_classifier,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.float32,
    )
    with torch.device("meta"):  # draws no weights that would be thrown away
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are in no file
    # A llama2.c model says that it is done by beginning the next text.
    model.generation_config.eos_token_id = [1, 2]
    setattr(model, TABLES, tables)
    return model.eval()


def write_checkpoint(model: LlamaForCausalLM, path: str | Path) -> None:
    """Write a Llama model as a version 0 checkpoint; weights of 16 bits become float32, exactly.

    Written beside its place first, so that a file of that name is always whole.

    Raises:
        ValueError: the model has something that the format has no place for, or that run.c
            computes otherwise; all reasons are given.
    """
    reasons = obstacles(model)
    if reasons:
        raise ValueError(f"llama2.c cannot run this model: {'; '.join(reasons)}")
    config: Any = model.config
    path = Path(path)
    header = Header(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        config.max_position_embeddings,
        shared_classifier=_shares_classifier(model),
    )
    header.check("the model")
    state = {**model.state_dict(), TABLES: _tables(model, header)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
        part = Path(temporary, path.name)
        with part.open("wb") as file:
            sizes = {name: getattr(header, name) for name in _FIELDS}
            if not header.shared_classifier:
                sizes["vocab_size"] *= -1
            file.write(struct.pack("<7i", *sizes.values()))
            for name, shape in tensors(header):
                names = [name.format(i) for i in range(header.n_layers)] if "{}" in name else [name]
                one = shape[1:] if "{}" in name else shape
                for each in names:
                    if tuple(state[each].shape) != one:
                        raise ValueError(f"{each} is {tuple(state[each].shape)}, not {one}")
                    tensor = state[each].detach().to("cpu", torch.float32)
                    if each.endswith(("q_proj.weight", "k_proj.weight")):
                        tensor = neighbours_from_halves(tensor, header.head_dim)
                    file.write(tensor.contiguous().numpy().astype("<f4", copy=False).tobytes())
        part.replace(path)


def halves_from_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of wq or wk, (heads * head_dim, dim), from llama2.c's order to Transformers'."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def neighbours_from_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of wq or wk, (heads * head_dim, dim), from Transformers' order to llama2.c's."""
    return rows.view(-1, 2, head_dim // 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def rope_tables(header: Header) -> Tensor:
    """Cosines and sines of RoPE's angles, (2, seq_len, head_dim / 2) float32.

    Angles are products in float32, as in export.py. The last bit of a cosine depends on the
    machine and on PyTorch's version.
    """
    pairs = torch.arange(0, header.head_dim, 2, dtype=torch.float32) / header.head_dim
    angles = torch.outer(torch.arange(header.seq_len).float(), 1.0 / ROPE_THETA**pairs)
    return torch.stack([angles.cos(), angles.sin()])


def obstacles(model: Any) -> list[str]:
    """Why a model cannot become a version 0 checkpoint; empty if it can."""
    config = model.config
    if config.model_type != "llama" or not hasattr(model, "lm_head"):
        return [f"it is a {type(model).__name__}, not a LlamaForCausalLM"]
    rope = dict(config.rope_parameters or {})
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    checks = {
        f"rope_type is {rope.get('rope_type')}: run.c does not scale RoPE": (
            rope.get("rope_type", "default") == "default"
        ),
        f"rope_theta is {rope.get('rope_theta')}, in run.c {ROPE_THETA:g}": (
            rope.get("rope_theta") == ROPE_THETA
        ),
        f"rms_norm_eps is {config.rms_norm_eps:g}, in run.c {NORM_EPS:g}": (
            math.isclose(config.rms_norm_eps, NORM_EPS, rel_tol=1e-6)
        ),
        f"hidden_act is {config.hidden_act}, in run.c silu": config.hidden_act in ("silu", "swish"),
        f"head_dim is {head_dim}, in run.c dim / heads": (
            head_dim * config.num_attention_heads == config.hidden_size
        ),
        "its attention has biases": not config.attention_bias,
        "its feed-forward layers have biases": not config.mlp_bias,
    }
    reasons = [reason for reason, fine in checks.items() if not fine]
    exact = (torch.float32, torch.bfloat16, torch.float16)
    wide = sorted({str(p.dtype) for p in model.parameters() if p.dtype not in exact})
    if wide:
        reasons.append(f"weights of {', '.join(wide)} would be rounded: cast them to float32 first")
    return reasons


def _shares_classifier(model: Any) -> bool:
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    return head is embedding or head.data_ptr() == embedding.data_ptr()


def _tables(model: Any, header: Header) -> Tensor:
    kept = getattr(model, TABLES, None)
    shape = (2, header.seq_len, header.head_dim // 2)
    return kept if kept is not None and tuple(kept.shape) == shape else rope_tables(header)


def _describe(header: Header) -> str:
    sizes = zip(_FIELDS, astuple(header), strict=False)
    own = "" if header.shared_classifier else ", a classifier of its own"
    return ", ".join(f"{name} {size}" for name, size in sizes) + own
