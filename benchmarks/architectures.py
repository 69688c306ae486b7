"""Transformers' architectures with the lab's attention against their eager path.

Each architecture is built with two small layers and random weights, and run on the same inputs
twice: with `set_attention(model, BACKEND)` and with "eager". A cell is the largest difference of
the logits at valid positions, divided by the largest logit, or the reason of a refusal.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    compare_with_oracle,
)
from labsupport.models.integration import AttentionRefusedError, attention_used, set_attention
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import resolve_device

BOUND = 1e-5  # of the largest logit, in float32
WINDOW = 5
VOCABULARY = 61
LENGTH = 16
DOCUMENTS = (5, 3, 8)  # packed in one row

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_OWN_HEADS = _SIZES | {"num_key_value_heads": 4}
_HEAD = _SIZES | {"head_dim": 8}
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "forced_eos_token_id": None,
}  # fmt: skip
# Of each model type: its sizes, and the fields that give it a sliding window (none: it has none).
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "gpt2": ({"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}, None),
    "gpt_neox": (_OWN_HEADS, None),
    "opt": (_OWN_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 32}, None),
    "bloom": ({"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, None),
    "falcon": (_OWN_HEADS, None),
    "phi3": (_SIZES, {}),
    "llama": (_SIZES, None),
    "llama4_text": (
        _HEAD | _EXPERTS | {"intermediate_size_mlp": 48},
        {"attention_chunk_size": WINDOW},
    ),
    "mistral": (_SIZES | {"sliding_window": 64}, {}),
    "mixtral": (_SIZES | _EXPERTS, {}),
    "qwen2": (_SIZES, {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": (_HEAD, {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_moe": (_HEAD | _EXPERTS | {"moe_intermediate_size": 24}, {"use_sliding_window": True}),
    "gemma": (_HEAD, None),
    "gemma2": (_HEAD | {"sliding_window": 64, "attn_logit_softcapping": 2.0}, {}),
    "gemma3_text": (_HEAD | {"sliding_window": 64}, {}),
    "gpt_oss": (_HEAD | _EXPERTS | {"sliding_window": 64}, {}),
    "olmo2": (_SIZES, None),
    "cohere2": (_HEAD | {"sliding_window": 64}, {}),
    "starcoder2": (_SIZES, {}),
    "deepseek_v3": (
        _OWN_HEADS
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 24},
        None,
    ),
    "smollm3": (_SIZES, {"layer_types": ["sliding_attention", "full_attention"]}),
    "bert": (_SIZES, None),
    "modernbert": (_SIZES | {"local_attention": 64, "cls_token_id": 1, "sep_token_id": 2}, {}),
    "t5": (_SIZES | _T5 | {"decoder_start_token_id": 1}, None),
    "bart": (_SIZES | _BART | {"decoder_start_token_id": 1}, None),
}  # fmt: skip
ENCODERS = {
    "bert": transformers.AutoModelForMaskedLM,
    "modernbert": transformers.AutoModelForMaskedLM,
}
TWO_SIDED = {"t5": transformers.AutoModelForSeq2SeqLM, "bart": transformers.AutoModelForSeq2SeqLM}
CASES = ("plain", "left padding", "packed", "cached", "windowed")
REFUSED = (AttentionInputError, AttentionRefusedError, BackendUnavailableError)


def build(name: str, *, windowed: bool = False, **options: Any) -> Any:
    """Build a model of two layers with random weights, in eval mode, on the CPU."""
    sizes, window = ARCHITECTURES[name]
    fields = sizes | {"attn_implementation": "eager"}
    if windowed:
        short = (
            {"local_attention": 2 * WINDOW} if name == "modernbert" else {"sliding_window": WINDOW}
        )
        fields = fields | short | (window or {})
    classes = ENCODERS | TWO_SIDED
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(fields | options))
    model = classes.get(name, AutoModelForCausalLM).from_config(config)
    with torch.no_grad():  # initial weights give nearly uniform attention, which hides a wrong mask
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8)
            elif name == "gpt_oss":
                parameter.normal_()
    return model.eval()


def runs(name: str, model: Any, case: str) -> Tensor:
    """Run one case: the logits at valid positions, (tokens, vocabulary)."""
    parts = [one.flatten(0, -2) for one in _FORWARDS[case](name, model)]
    return torch.cat(parts)


def _inputs(model: Any, batch: int) -> tuple[Tensor, Tensor]:
    """Return token ids (batch, LENGTH), and which of them are no left padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=generator)
    valid = torch.arange(LENGTH) >= 3 * torch.arange(batch)[:, None]
    return ids.to(model.device), valid.to(model.device)


def _forward(name: str, model: Any, ids: Tensor, **options: Any) -> Tensor:
    both = {"decoder_input_ids": ids[:, : LENGTH // 2]} if name in TWO_SIDED else {}
    return model(ids, **both, **options).logits


def _plain(name: str, model: Any) -> list[Tensor]:
    return [_forward(name, model, _inputs(model, 3)[0])]


def _left_padding(name: str, model: Any) -> list[Tensor]:
    ids, valid = _inputs(model, 3)
    logits = _forward(name, model, ids, attention_mask=valid.long())
    return [logits if name in TWO_SIDED else logits[valid]]


def _packed(name: str, model: Any) -> list[Tensor]:
    """Documents in one row, with the default cache and without one; for eager, each alone."""
    ids, outs = _inputs(model, 1)[0], []
    if model.config._attn_implementation == "eager":
        alone = [_forward(name, model, part) for part in ids.split(DOCUMENTS, dim=1)]
        return [torch.cat(alone, dim=1)] * 2
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None].to(ids.device)
    for cache in (True, False):
        options = {} if name in ENCODERS else {"use_cache": cache}
        outs.append(_forward(name, model, ids, position_ids=positions, **options))
    return outs


def _cached(name: str, model: Any) -> list[Tensor]:
    """A padded prompt, a chunk, and single tokens."""
    (ids, valid), past, outs, seen = _inputs(model, 2), None, [], 0
    encoded = model.get_encoder()(ids) if name in TWO_SIDED else None
    for length in (7, 3, 1, 1):
        new = ids[:, seen : seen + length]
        options: dict[str, Any] = {"past_key_values": past, "use_cache": True}
        seen += length
        if encoded is None:
            out = model(new, attention_mask=valid[:, :seen].long(), **options)
        else:
            out = model(encoder_outputs=encoded, decoder_input_ids=new, **options)
        past = out.past_key_values
        outs.append(out.logits[:, -length:][valid[:, seen - length : seen]])
    return outs


def _windowed(name: str, model: Any) -> list[Tensor]:
    cases = (_plain, _left_padding, _packed) + (() if name in ENCODERS else (_cached,))
    return [logits.flatten(0, -2) for case in cases for logits in case(name, model)]


_FORWARDS: dict[str, Callable[[str, Any], list[Tensor]]] = dict(
    zip(CASES, (_plain, _left_padding, _packed, _cached, _windowed), strict=True)
)


def compare(name: str, case: str, backend: str = "auto") -> float | str | None:
    """Return the error against eager, the reason of a refusal, or None without such a case."""
    without = (case == "windowed" and ARCHITECTURES[name][1] is None) or (
        case == "cached" and name in ENCODERS
    )
    if without or (case == "packed" and name in TWO_SIDED):
        return None
    model = build(name, windowed=case == "windowed")
    with torch.no_grad():
        expected = runs(name, model, case)
        try:
            set_attention(model, backend)
            found = runs(name, model, case)
        except REFUSED as error:
            return str(error)
    return float((found - expected).abs().max() / expected.abs().max())


def judge(name: str, case: str, backend: str, device: torch.device) -> dict[str, Any]:
    """Judge bfloat16 by the error rule: eager in float32 is the oracle, in bfloat16 the yardstick.

    In float64 the eager path is NaN beside padding: it takes the softmax in float32. With several
    experts, rounding would choose among them.
    """
    windowed = case == "windowed" and ARCHITECTURES[name][1] is not None
    model = build(name, windowed=windowed, num_local_experts=1).to(device, torch.bfloat16)
    case = "plain" if case == "windowed" and not windowed else case
    with torch.no_grad():
        oracle = runs(name, copy.deepcopy(model).float(), case)
        textbook = runs(name, model, case)
        set_attention(model, backend)
        report = compare_with_oracle(runs(name, model, case), textbook, oracle)
    used = ", ".join(dict.fromkeys(use.backend for use in attention_used(model)))
    return {"error": report.max_error, "allowed": report.allowed, "ok": report.ok, "ran": used}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="as for set_attention")
    parser.add_argument("--page", type=Path, help="write docs/architectures.md to this file")
    parser.add_argument(
        "--bfloat16", nargs="*", metavar="NAME", choices=ARCHITECTURES,
        help="judge these in bfloat16 by the error rule instead",
    )  # fmt: skip


def measure(options: argparse.Namespace) -> pd.DataFrame:
    rows = []
    device = resolve_device(options.device if options.bfloat16 else "cpu")
    for name in options.bfloat16 or ARCHITECTURES:
        for case in CASES:
            row: dict[str, Any] = {"architecture": name, "case": case}
            if options.bfloat16:
                row |= judge(name, case, options.backend, device)
            else:
                row["result"] = compare(name, case, options.backend)
                row["ok"] = not isinstance(row["result"], float) or row["result"] <= BOUND
            rows.append(row)
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = provenance(device, backend=options.backend)
    return table


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    if options.bfloat16:
        return table.to_string(index=False, float_format=lambda x: f"{x:.1e}")
    text = page(table, options.backend)
    if options.page:
        options.page.write_text(text, encoding="utf-8")
    return text


def page(table: pd.DataFrame, backend: str) -> str:
    """Write the table as the page docs/architectures.md, its refusals as numbered lines."""
    reasons: list[str] = []
    lines = [f"| architecture | {' | '.join(CASES)} |", "| --- |" + " --- |" * len(CASES)]
    for name, rows in table.groupby("architecture", sort=False):
        cells = []
        for result in rows.result:
            if isinstance(result, str):
                reasons += [] if result in reasons else [result]
                result = f"refused ({reasons.index(result) + 1})"
            elif result is None or pd.isna(result):
                result = "–"
            else:
                result = f"{result:.0e}".replace("e-0", "e-")
            cells.append(result)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    refusals = [f"{i}. {' '.join(text.split())}" for i, text in enumerate(reasons, start=1)]
    return _PAGE.format(
        count=len(ARCHITECTURES), backend=backend, versions=transformers.__version__,
        bound=f"{BOUND:.0e}".replace("e-0", "e-"), table="\n".join(lines), window=WINDOW,
        reasons="\n".join(refusals),
    )  # fmt: skip


_PAGE = """\
# Transformers' architectures

`python -m benchmarks architectures --page docs/architectures.md` writes this page: {count} model
types of Transformers {versions}, each with two small layers and random weights, in float32 on a
CPU, after `set_attention(model, "{backend}")`. A cell is the largest difference from the eager
path, as a share of the largest logit (at most {bound}). "–": the model has no such case.

- plain: three rows of one length. left padding: an `attention_mask` with zeros on the left.
- packed: three documents in one row, with `position_ids` that start again, with a cache and
  without one; the eager path runs each document alone. (In one row it separates documents
  without a cache only.)
- cached: a padded prompt, a second part, and single tokens.
- windowed: all of these with a sliding window, or chunks, of {window} tokens.

{table}

{reasons}
"""
