"""Functions of the exam edition in place of those that answer an exercise.

They call PyTorch's own functions, or the student's, once those have passed a check. No check takes
them for an answer: while one runs, and where a submission is graded, they are left out.

An edition without the answers holds a copy of this file as `labsupport/stand_ins.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from labsupport.left_out import left_out, waits_for  # pyrefly: ignore[missing-import]
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def passed() -> dict[str, Callable[..., Any]]:
    """Return the student's functions that passed a check; none while one runs."""
    from labsupport.checks import cases

    return {} if cases.judging() else cases.PASSED


def yours(name: str, exercise: str) -> Callable[..., Any]:
    """Return the student's function of this name: it passed a check, or is another notebook's.

    Raises:
        LeftOutError: there is none, or a check runs.
    """
    from labsupport.checks import cases
    from labsupport.course.own import solution_of

    notebook = _notebook()
    if name not in passed() and notebook and name not in notebook and not cases.judging():
        own = solution_of(f"0{exercise[0]}", name)
        if own.__name__ == name and "NotImplementedError" not in own.__code__.co_names:
            cases.PASSED[name] = own
    if name not in passed():
        waits_for(exercise, name)
    return passed()[name]


def _notebook() -> Mapping[str, Any]:
    """Return the notebook's variables; none in a process without a notebook."""
    try:
        return get_ipython().user_ns  # type: ignore[name-defined]
    except NameError:
        return {}


# --- attention/reference.py -----------------------------------------------------------------------


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and weights of the student's textbook attention, or of PyTorch's own."""
    seen = _seen(q, k, mask, causal)
    own = _textbook(q, k, v, seen, softmax_scale)
    if own is not None:
        return own
    everything = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device).expand(
        *k.shape[:-2], -1, -1
    )
    return _math(q, k, v, seen, softmax_scale), _math(q, k, everything, seen, softmax_scale)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the same attention, and its log-sum-exp or None."""
    scale = options.pop("softmax_scale", None)
    seen = _seen(q, k, None, **options)
    own = _textbook(q, k, v, seen, scale)
    lse = _flash(q, k, v, seen, scale)[1].float() if return_lse else None
    return _math(q, k, v, seen, scale) if own is None else own[0], lse


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of PyTorch's FlashAttention for CPUs, in float64."""
    out, lse = _flash(q, k, v, _seen(q, k, mask, **options), softmax_scale)
    return out.to(q.device), lse


def _seen(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
) -> Tensor | None:
    """Return all options as one mask: boolean, or added to the scores."""
    from labsupport.attention.masks import AttentionMask, alibi_bias
    from labsupport.checks import cases

    if cases.judging():
        left_out('In a check, the textbook (backend="standard")', "1-1")
    band = AttentionMask.of(q.shape[-2], k.shape[-2], causal=causal, window_size=window_size)
    visible = band.full_mask(q.device)
    if mask is not None and mask.dtype == torch.bool:
        visible, mask = mask if visible is None else visible & mask, None
    if alibi_slopes is not None:
        rows, cols = slice(0, q.shape[-2]), slice(0, k.shape[-2])
        mask = alibi_bias(alibi_slopes, rows, cols, band.offset, q.dtype)
    if mask is None or visible is None:
        return visible if mask is None else mask
    return mask.masked_fill(~visible, -torch.inf)


def _textbook(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    own = passed().get("textbook_attention")
    if own is None or (seen is not None and seen.dtype != torch.bool):
        return None
    return own(q if scale is None else q * (scale * q.shape[-1] ** 0.5), k, v, seen)


def _math(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None) -> Tensor:
    if seen is not None and seen.dtype != torch.bool:
        seen = seen.to(q.dtype)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # in the inputs' dtype
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in float64, the first on the CPU."""
    lead = q.shape[:-2]
    flat = [x.cpu().double().reshape(1, -1, *x.shape[-2:]) for x in (q, k, v)]
    if seen is not None:
        seen = seen.cpu() if seen.dtype == torch.bool else seen.cpu().double()
        rows = torch.where(seen, 0.0, -torch.inf).double() if seen.dtype == torch.bool else seen
        seen = rows.expand(*lead, *rows.shape[-2:]).reshape(1, -1, *rows.shape[-2:])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(*flat, 0.0, False, attn_mask=seen, scale=scale)
    if seen is not None:
        lse = lse.masked_fill((seen == -torch.inf).all(-1), -torch.inf)
    return out.reshape(*lead, *out.shape[-2:]), lse.detach().reshape(*lead, -1).to(q.device)


# --- attention/flash_torch.py ---------------------------------------------------------------------


def flash_attention_forward(*_: Any, **__: Any) -> Any:
    """Wait for the student's function: a page calls this one only until that passes."""
    waits_for("1-4", "my_flash_forward")


def flash_attention_backward(*_: Any, **__: Any) -> Any:
    """Wait for the student's function, too."""
    waits_for("1-5", "my_flash_backward")


# --- attention/online_softmax.py ------------------------------------------------------------------


def merge_attention(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two partial results by the student's function."""
    return yours("merge", "3-4")(out, lse, part, part_lse)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result, (batch, seqlen, heads, head_dim), in place."""
    new, both = merge_attention(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
    out.copy_(new.transpose(1, 2))
    lse.copy_(both)


# --- attention/rotary.py --------------------------------------------------------------------------


def rotary_angles(
    positions: Tensor, head_dim: int, *, base: float = 10_000.0, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the student's cosines and sines."""
    flat = positions.flatten() if scaling == 1 else positions.flatten() / scaling
    tables = yours("rotary_angles", "3-1")(flat, head_dim, base)
    cos, sin = (table.reshape(*positions.shape, -1) for table in tables)
    return cos, sin


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn queries or keys by the student's function."""
    turn = yours("apply_rope", "3-1")
    if cos.ndim == 3:
        rows = zip(x, cos.expand(len(x), -1, -1), sin.expand(len(x), -1, -1), strict=True)
        return torch.cat([apply_rotary_emb(a[None], *b, interleaved=interleaved) for a, *b in rows])
    if x.ndim == 3:
        return apply_rotary_emb(x[None], cos, sin, interleaved=interleaved)[0]
    pairs = cos.shape[-1]
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    order = torch.arange(2 * pairs, device=x.device)
    if interleaved:
        order = torch.cat([order[::2], order[1::2]])
    return torch.cat([turn(head[..., order], cos, sin)[..., order.argsort()], rest], dim=-1)


def permute_rotary_rows(weight: Tensor, heads: int, *, to_interleaved: bool) -> Tensor:
    """Move rows by the student's function, or back."""
    move = yours("pairs_to_halves", "3-1")
    if not to_interleaved:
        return move(weight, heads)
    rows = torch.arange(len(weight), device=weight.device)
    return weight[move(rows[:, None], heads).flatten().argsort()]


# --- precision/autofix.py -------------------------------------------------------------------------


def safe_flash_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, str]:
    """Return the output of the student's function, and a report of its casts and its error."""
    out, dtype = yours("half_attention", "1-6")(q, k, v), yours("half_dtype", "1-6")(q, k, v)
    exact, _lse = oracle_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    error = (out - exact.transpose(1, 2)).abs().max().item()
    given = ", ".join(str(x.dtype) for x in (q, k, v))
    report = f"your half_attention casts q, k, v from {given} to {dtype}; result in {out.dtype}\n"
    report += f"  error of the output: at most {error:.1e}"
    return out, report.replace("torch.", "")


# --- other rooms ----------------------------------------------------------------------------------


def compute_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    head: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor:
    """Return PyTorch's own loss, of all logits together."""
    rows = logits if head is None else head(logits)
    return F.cross_entropy(
        rows.flatten(0, -2).to(dtype), labels.flatten().long(), ignore_index=ignore_index
    )


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return the student's loss."""
    loss = yours("ChunkedLoss", "3-2")
    return loss.apply(hidden.flatten(0, -2), weight, labels.flatten(), chunk or 256)  # type: ignore[attr-defined]


def chunks_of(rank: int, world_size: int, *, zigzag: bool = False) -> tuple[int, ...]:
    """Return the chunks that a rank holds: by the student's function, or the one."""
    return tuple(yours("zigzag_chunks", "3-5")(rank, world_size)) if zigzag else (rank,)


def positions_of(
    seqlen_local: int,
    rank: int,
    world_size: int,
    *,
    zigzag: bool = False,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the positions of a rank's tokens."""
    if zigzag:
        own = yours("zigzag_positions", "3-5")
        return own(seqlen_local * world_size, rank, world_size).to(device)
    return torch.arange(seqlen_local, device=device) + rank * seqlen_local


def unshard_sequence(shards: list[Tensor], *, zigzag: bool = False, dim: int = 1) -> Tensor:
    """Return the whole sequence from the shards of all ranks."""
    if not zigzag:
        return torch.cat(shards, dim)
    whole = yours("unzigzag", "3-5")([shard.transpose(1, dim) for shard in shards])
    return whole.transpose(1, dim)


# Peaks by the lab's plan of textbook steps on a CPU, by vocabulary and length: those of notebook 3
# that are above its limits, and must not run before there is a plan.
PEAKS = {(257, 4096): 1_808_652_800, (16_384, 2048): 792_200_192}


def plan_memory(config: Any, *, seqlen: int, savings: Any, **how: Any) -> SimpleNamespace:
    """Return the peak by the student's count; before exercise 3-3 a known one, or NaN."""
    own, bytes_ = passed().get("kept_bytes"), float("nan")
    if own is None and savings.attention == "standard" and str(how["device"]) == "cpu":
        bytes_ = PEAKS.get((config.vocab_size, seqlen), bytes_)
    elif own is not None:
        sizes = config.width, config.layers, config.heads, config.inner_width, config.vocab_size
        bytes_ = 16 * config.parameters + own(
            seqlen,
            *sizes,
            stores_scores=savings.attention == "standard",
            checkpoint=savings.checkpoint,
            loss_chunk=savings.loss_chunk,
        )
    return SimpleNamespace(peak_bytes=bytes_, when="the plan")


def score_mib(table: Any) -> Callable[[float], float]:
    """Return the memory of S and P by length, in MiB, by the student's function."""
    own, row = yours("score_bytes", "1-2"), table.iloc[0]
    size = getattr(torch, row["dtype"]).itemsize
    return lambda seqlen: own(int(row.batch), int(row.heads), int(seqlen), size) / 2**20


def passes_of(case: Any, window_size: tuple[int, int] = (-1, -1)) -> list[Any]:
    """Return FLOPs and bytes of a case's passes, by the student's function."""
    from labsupport.attention.masks import AttentionMask
    from labsupport.profiling.work import Pass

    cost, sizes = yours("attention_cost", "4-1"), (case.batch, case.seqlen, case.kv_seqlen)
    band = AttentionMask.of(*sizes[1:], causal=case.causal, window_size=window_size)
    share = band.visible_pairs() / (case.seqlen * case.kv_seqlen)
    options = {"dtype": getattr(torch, case.dtype), "causal": False}
    passes = [False] if case.direction == "forward" else [False, True]
    found = (
        cost(*sizes, case.heads, case.kv_heads, case.head_dim, backward=backward, **options)
        for backward in passes
    )
    return [Pass(flops * share, moved) for flops, moved in found]


def fused_bytes(case: Any) -> float:
    """Return the bytes of a case's passes, by the student's function."""
    return float(sum(part.bytes for part in passes_of(case)))


def model_flops(*arguments: Any, **options: Any) -> float:
    """Return NaN: a table has no FLOPs then."""
    return float("nan")


def float16(kind: type, **changes: Any) -> Any:
    """Return the student's policy for a GPU without bfloat16."""
    return replace(yours("my_policy", "2-5")("cuda", (7, 5)), **changes)


def roofline(cases: Any, ceilings: Any, *, window_size: tuple[int, int] = (-1, -1)) -> Any:
    """Return the table of cases with their bounds, by the student's functions."""
    import pandas as pd

    from labsupport.analysis.predictor.split import case_of
    from labsupport.analysis.roofline import Roof

    bound, roof = yours("roof", "4-1"), Roof.of(ceilings)
    measured = isinstance(cases, pd.DataFrame)
    listed = [case_of(row) for row in cases.to_dict("records")] if measured else list(cases)
    table = cases.copy() if measured else pd.DataFrame([vars(case) for case in listed])
    rows = []
    for case in listed:
        parts = passes_of(case, window_size)
        judged = [bound(p.flops, p.bytes, roof.peak(case.dtype), roof.gb_s) for p in parts]
        flops, moved = sum(p.flops for p in parts), sum(p.bytes for p in parts)
        by = max(judged, key=lambda one: one[1])[2]
        rows.append((flops, moved, flops / moved, sum(ms for _, ms, _ in judged), by))
    columns = ["flops", "bytes", "intensity", "bound_ms", "bound_by"]
    table[columns] = pd.DataFrame(rows, columns=columns, index=table.index)
    table["of_bound"] = table["bound_ms"] / table.get("median_ms", float("nan"))
    table.attrs = {**getattr(cases, "attrs", {}), "roof": vars(roof)}
    return table


def closed_form(
    algorithm: str, direction: str, sizes: Any, capacity: int | None = None
) -> tuple[int, int]:
    """Return elements read and written by a forward, by the student's functions."""
    if direction != "forward":
        left_out("analysis.traffic.closed_form of a backward", "4-2")
    if algorithm == "standard":
        return yours("textbook_traffic", "4-2")(sizes.seqlen_q, sizes.head_dim, sizes.block_q)
    outside = {"version1": "keys", "version2": "queries"}[algorithm]
    blocks = sizes.block_q, sizes.block_k
    own = yours("tiled_traffic", "4-2")
    return own(sizes.seqlen_q, sizes.head_dim, *blocks, outside=outside, causal=sizes.causal)


def visible_tiles(sizes: Any) -> int:
    """Return the tiles with a visible pair: what passes beside Q, by the student's function."""
    read, _ = closed_form("version2", "forward", sizes)
    return round((read - sizes.seqlen_q * sizes.head_dim) / (2 * sizes.block_k * sizes.head_dim))


def calibrate_run(run: str) -> tuple[Any, Any]:
    """Return the model that the whole package fitted, from a file, and the held-out rows."""
    from labsupport.analysis.predictor.calibration import Fit, Model
    from labsupport.analysis.predictor.device import device_of_run
    from labsupport.analysis.predictor.split import divide

    stored = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))[run]
    fits = {tuple(key): Fit(**fit) for key, fit in stored["fits"]}
    return Model(device_of_run(run.split(":")[0]), fits, stored["spread"]), divide(run)[1]


# --- other processes ------------------------------------------------------------------------------


def launching(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return `launch`, whose processes know the student's functions."""

    @wraps(launch)
    def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return launch(partial(_knowing, dict(passed()), function), *args, **options)

    return run


def _knowing(
    own: Mapping[str, Any], function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    passed().update(own)
    return function(*args, **options)
