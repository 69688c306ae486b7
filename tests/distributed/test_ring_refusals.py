"""What a ring cannot compute is refused, on all ranks, and the error says what helps."""

import pytest
import torch

from labsupport.attention import AttentionInputError, BackendUnavailableError
from labsupport.attention.registry import AttentionCall
from labsupport.distributed.ring import ring_flash_attn_func, zigzag_ring_flash_attn_func
from labsupport.distributed.ring.kernels import KERNELS
from tests.distributed.rings import SLOPES, refusal, shards_of


def unequal(rank):
    return shards_of(5 if rank == 2 else 6)


def without_gradients_on_rank_0(rank):
    return tuple(x.detach() if rank == 0 else x for x in shards_of(4))


def of_two_dtypes(rank):
    return shards_of(4, torch.float32 if rank else torch.bfloat16)


def test_ranks_that_disagree_all_raise_and_say_what_each_has(workers):
    for make_inputs, said in (
        (unequal, ["seqlen_local", "6, 6, 5", "Pad"]),
        (without_gradients_on_rank_0, ["gradients wanted", "False, True, True"]),
        (of_two_dtypes, ["dtype", "torch.bfloat16, torch.float32"]),
    ):
        answers = workers.run(refusal, make_inputs, {}, ranks=3)
        assert {name for name, _ in answers} == {"AttentionInputError"}
        assert all(part in text for _, text in answers for part in said)


def refusal_on_rank_1(rank, group):
    """Rank 1 asks for a window, which the kernel cannot do; the other one has its message."""
    options = {"kernel": "native"} | ({"window_size": (1, 1)} if rank else {})
    return refusal(rank, group, lambda _: shards_of(4), options)


def test_what_one_rank_refuses_is_an_error_on_all_and_not_a_hang(workers):
    first, second = workers.run(refusal_on_rank_1, ranks=2)
    assert "rank 1 has refused this call of the ring" in first[1]
    assert "cannot do windows" in first[1]
    assert second[0] == BackendUnavailableError.__name__
    assert "cannot do windows in a ring" in second[1]
    assert "Kernels that can: flash_triton, flash_torch" in second[1]


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"torchrun .*init_process_group"):
        ring_flash_attn_func(*shards_of(4))


def test_inputs_that_no_ring_takes_are_refused(group_of_one):
    q, k, v = shards_of(6)
    for call, message in (
        (lambda: ring_flash_attn_func(q, k, v, dropout_p=0.1), r"no dropout, but dropout_p=0\.1"),
        (lambda: ring_flash_attn_func(q[:, :4], k, v), "self-attention"),
        (lambda: ring_flash_attn_func(q, k, v, layout="stripes"), "there are contiguous, zigzag"),
        (lambda: zigzag_ring_flash_attn_func(*shards_of(5)), "two chunks of one length, but 5"),
        (
            lambda: ring_flash_attn_func(q, k, v, kernel="flash"),
            "auto, cudnn, native, flash_triton, flash_gluon, flash_torch, fa4",
        ),
    ):
        with pytest.raises(AttentionInputError, match=message):
            call()


def test_kernels_say_what_they_cannot_do():
    q, k, v = shards_of(4)

    def reasons(**options):
        call = AttentionCall(q, k, v, **options, return_lse=True)
        return {kernel.name: kernel.reasons(call) for kernel in KERNELS}

    plain = reasons()
    torch.use_deterministic_algorithms(True)
    ordered = reasons()
    torch.use_deterministic_algorithms(False)
    windowed = reasons(window_size=(2, 2), alibi_slopes=SLOPES[:2])
    assert plain["flash_torch"] == plain["native"] == []
    assert windowed["flash_torch"] == ordered["flash_torch"] == []
    assert any("windows" in reason for reason in windowed["native"])
    assert any("alibi" in reason for reason in windowed["native"])
    assert any("log-sum-exp from outside" in reason for reason in plain["fa4"])
    assert any("any order" in reason for reason in ordered["cudnn"])
