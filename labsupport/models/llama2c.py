"""llama2.c's files as Transformers' objects: a checkpoint (version 0) and its tokenizer.

A checkpoint is 28 bytes of header and then nothing but float32 numbers, little-endian, in this
order (Andrej Karpathy, llama2.c: `memory_map_weights` in run.c and `legacy_export` in export.py):

    header    7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len;
              a negative vocab_size says that the classifier has separate weights
    weights   token embeddings, then of all layers together: attention norms, wq, wk, wv, wo,
              feed-forward norms, w1, w2, w3; then the final norm
    tables    cosines and sines of RoPE, (seq_len, head_dim / 2) each; run.c skips them now
    wcls      the classifier, if it has separate weights

llama2.c pairs the numbers of a head for RoPE as neighbours, Transformers half a head apart
(`labsupport.attention.rotary`): the rows of wq and wk move. Forgetting it gives no error, only a
model that talks nonsense.

A tokenizer.bin (tokenizer.py and `build_tokenizer` in run.c) is the length of the longest token as
an int32, then of each token its score (float32), its length (int32) and its bytes. Tokens 0, 1 and
2 are unknown, begin (BOS) and end of text (EOS); tokens 3 to 258 are the 256 bytes, for what no
other token covers. Text becomes tokens as in Llama 2's SentencePiece model: a space in front, one
token for each character or for each of its UTF-8 bytes, then the neighbours whose union has the
best score are merged, again and again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from labsupport.attention.rotary import permute_rotary_rows

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# What run.c has no number for in the file.
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


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
    shared_classifier: bool

    @property
    def head_dim(self) -> int:
        """Numbers in a head."""
        return self.dim // self.n_heads

    @property
    def file_size(self) -> int:
        """Bytes of a whole file."""
        return 28 + 4 * sum(math.prod(shape) for _, shape in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each tensor of a file: Transformers' name, with {} for the layer, and its shape."""
        layers, kv_dim = self.n_layers, self.n_kv_heads * self.head_dim
        block = "model.layers.{}"
        yield "model.embed_tokens.weight", (self.vocab_size, self.dim)
        yield f"{block}.input_layernorm.weight", (layers, self.dim)
        yield f"{block}.self_attn.q_proj.weight", (layers, self.dim, self.dim)
        yield f"{block}.self_attn.k_proj.weight", (layers, kv_dim, self.dim)
        yield f"{block}.self_attn.v_proj.weight", (layers, kv_dim, self.dim)
        yield f"{block}.self_attn.o_proj.weight", (layers, self.dim, self.dim)
        yield f"{block}.post_attention_layernorm.weight", (layers, self.dim)
        yield f"{block}.mlp.gate_proj.weight", (layers, self.hidden_dim, self.dim)  # w1
        yield f"{block}.mlp.down_proj.weight", (layers, self.dim, self.hidden_dim)  # w2
        yield f"{block}.mlp.up_proj.weight", (layers, self.hidden_dim, self.dim)  # w3
        yield "model.norm.weight", (self.dim,)
        yield "rope_tables", (2, self.seq_len, self.head_dim // 2)
        if not self.shared_classifier:
            yield "lm_head.weight", (self.vocab_size, self.dim)


def read_header(file: IO[bytes]) -> Header:
    """Read the header at the beginning of an open file.

    Raises:
        ValueError: the file is too short, or no model can have these sizes.
    """
    raw = file.read(28)
    sizes = struct.unpack("<7i", raw) if len(raw) == 28 else (0,) * 7
    dim, hidden, layers, heads, kv_heads, vocabulary, length = sizes
    fits = min(dim, hidden, layers, heads, kv_heads, abs(vocabulary), length) > 0
    if not fits or dim % heads or heads % kv_heads or dim // heads % 2:
        raise ValueError(f"no llama2.c checkpoint of version 0: its header would be {sizes}")
    return Header(dim, hidden, layers, heads, kv_heads, abs(vocabulary), length, vocabulary > 0)


def read_checkpoint(path: str | Path) -> LlamaForCausalLM:
    """Read a checkpoint as a model in eval mode, float32, on the CPU, with SDPA attention.

    Raises:
        ValueError: not a version 0 checkpoint, or longer or shorter than its header says.
        FileNotFoundError: there is no such file.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    path = Path(path)
    state: dict[str, Tensor] = {}
    with path.open("rb") as file:
        header = read_header(file)
        if path.stat().st_size != header.file_size:
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes, but its header ({header}) asks for "
                f"{header.file_size:,}: it is damaged, or no llama2.c checkpoint of version 0"
            )
        for name, shape in header.tensors():
            numbers = np.fromfile(file, dtype="<f4", count=math.prod(shape))
            tensor = torch.from_numpy(numbers.astype(np.float32, copy=False)).view(shape)
            if "{}" not in name:
                state[name] = tensor
                continue
            for layer, weight in enumerate(tensor):
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    heads = len(weight) // header.head_dim
                    weight = permute_rotary_rows(weight, heads, to_interleaved=False)
                state[name.format(layer)] = weight
    del state["rope_tables"]
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
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.float32,
    )
    with torch.device("meta"):  # draws no weights that would be thrown away
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are in no file
    # A llama2.c model ends a text by beginning the next one.
    model.generation_config.eos_token_id = [1, 2]
    return model.eval()


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Read a tokenizer.bin, or a SentencePiece model of Llama's (a name that ends in .model).

    Raises:
        ValueError: the file is cut off, or something else.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: a .model, and the sentencepiece package is not installed.
    """
    path = Path(path)
    if path.suffix != ".model":
        return tokenizer_of(list(_pieces(path.read_bytes(), path)))
    import sentencepiece

    spm = sentencepiece.SentencePieceProcessor(model_file=str(path))
    named = [(spm.IdToPiece(i).replace("▁", " "), spm.GetScore(i)) for i in range(len(spm))]
    return tokenizer_of(named)


def _pieces(raw: bytes, path: Path) -> Iterator[tuple[str, float]]:
    try:
        position, (longest,) = 4, struct.unpack_from("<i", raw)
        while position < len(raw):
            score, length = struct.unpack_from("<fi", raw, position)
            if not 0 <= length <= min(longest, len(raw) - position - 8):
                raise ValueError(f"a token of {length} bytes at byte {position}")
            position += 8 + length
            yield raw[position - length : position].decode(), score
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is cut off, or no tokenizer.bin: {error}") from None


def tokenizer_of(pieces: Sequence[tuple[str, float]]) -> PreTrainedTokenizerFast:
    """Make a byte-fallback BPE tokenizer of each token's text and score, padding on the left.

    A pair of tokens is merged the earlier, the better the score of its union. (SentencePiece and
    run.c look at scores alone; of two ways to write the same union, they take the leftmost.)

    Raises:
        ValueError: there are no more tokens than the special ones and the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    first = len(_SPECIAL) + len(_BYTES)
    if len(pieces) <= first:
        raise ValueError(f"a vocabulary of {len(pieces)} tokens has no words beside its bytes")
    texts = [*_SPECIAL, *_BYTES, *(text for text, _ in pieces[first:])]
    token = {text: i for i, text in enumerate(texts)}
    merges = [
        (-score, text[:cut], text[cut:])
        for text, score in pieces[first:]
        for cut in range(1, len(text))
        if token.get(text[:cut], 0) >= first and token.get(text[cut:], 0) >= first
    ]
    ranked = [(left, right) for _, left, right in sorted(merges, key=lambda merge: merge[0])]
    made = Tokenizer(models.BPE(token, ranked, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Prepend(" ")
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        padding_side="left",
        split_special_tokens=True,  # a text that is written like "<s>" is text
    )
