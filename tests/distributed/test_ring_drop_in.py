"""ring-flash-attention's calls as its users type them, and refusals on all ranks alike."""

import re

import pytest
import torch

import labsupport.distributed as lab
from labsupport.distributed import (
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)

FAMILIES = {
    "contiguous": (
        ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func,
    ),
    "zigzag": (
        zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func,
        zigzag_ring_flash_attn_qkvpacked_func,
    ),
    "striped": (
        stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", FAMILIES)
def test_packed_names_positions_and_keywords_are_the_same_call(group_of_one, layout):
    plain, kvpacked, qkvpacked = FAMILIES[layout]
    q, k, v = torch.randn(3, 2, 8, 2, 4)
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2).requires_grad_()
    keywords = {"deterministic": False, "return_attn_probs": True, "group": None}
    out, lse, nothing = plain(q, k, v, causal=True, softmax_scale=0.3, **keywords)
    assert lab.ring.last_ring_call().plan.layout == layout
    assert nothing is None
    assert lse.shape == (2, 2, 8)
    positions = 0.0, 0.3, True, (-1, -1), None, True, True, None
    for again in (kvpacked(q, kv, *positions), qkvpacked(qkv, *positions)):
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    again[0].sum().backward()
    assert qkv.grad.isfinite().all()
    assert plain(q, k, v, 0.0, 0.3, True).shape == q.shape  # without return_attn_probs
    assert not torch.equal(plain(q, k, v, 0.0, 0.3, False), out)  # a full one, asked for by place


def refusal(rank, group, name, changes, wrong_rank):
    """On a rank: the error of a call in which one rank changes arguments."""
    q = torch.randn(1, 4, 2, 8)
    arguments = {"q": q, "kv": torch.stack([q, q], 2), "group": group}
    if rank == wrong_rank:
        arguments |= changes
    try:
        getattr(lab, name)(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": torch.ones(1, 4, 3, 2, 8)}, r"kv must have shape \(batch, seqlen_local, 2"),
        ({"kv": None}, "kv must have shape .* but NoneType"),
        ({"dropout_p": True}, "no dropout, but dropout_p=True"),
        ({"alibi_slopes": torch.ones(2)}, "no ALiBi"),
        ({"causal": (-1, -1)}, r"causal is True or False, but \(-1, -1\)"),
        ({"deterministic": 1}, "deterministic is True or False"),
        ({"return_attn_probs": "group"}, r"return_lse \(return_attn_probs\) is True or False"),
        ({"window_size": 8}, "window_size is"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"transport": "pigeons"}, "there are auto"),
        ({"layout": ["zigzag"]}, "there are contiguous"),
    ],
    ids=str,
)
def test_an_argument_that_one_rank_gets_wrong_is_an_error_on_all_and_not_a_hang(
    pool, changes, message
):
    answers = pool(4).run(refusal, "ring_flash_attn_kvpacked_func", changes, 1, ranks=2)
    assert all(re.search(message, answer or "no error") for answer in answers), answers
    assert "rank 1 has refused" in answers[0]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ring_flash_attn_varlen_func", "attention_varlen"),
        ("zigzag_ring_flash_attn_varlen_qkvpacked_func", "attention_varlen"),
        ("llama3_flash_attn_varlen_kvpacked_func", "attention_varlen"),
        ("llama3_flash_attn_prepare_cu_seqlens", "attention_varlen"),
        ("substitute_hf_flash_attn", "shard_model"),
        ("update_ring_flash_attn_params", "no packed documents"),
    ],
)
def test_a_name_that_the_lab_lacks_says_what_to_use(name, instead):
    with pytest.raises(ImportError, match=f"no {name}: .*{instead}"):
        exec(f"from labsupport.distributed import {name}")
