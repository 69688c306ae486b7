import warnings

import pytest
import torch

from labsupport import checks
from labsupport.precision import FlashAttentionConfig
from tests.checks.solutions import broken, function, solution_source

DEVICES, RANGE, MEMORY = (
    checks.check_policy_devices,
    checks.check_policy_range,
    checks.check_policy_memory,
)
ALL = [DEVICES, RANGE, MEMORY]
OLD, NEW = 'device_type == "cuda" and capability < (8, 0)', "FlashAttentionConfig.bfloat16("
OLDER = "FlashAttentionConfig.float16(residual=torch.float32)"


def source():
    return solution_source("02", "ex-2-5-policy")


def student_with(*changes):
    return broken(source(), "my_policy", *changes, FlashAttentionConfig=FlashAttentionConfig)


def diagnosis(student, *some):
    with pytest.raises(checks.CheckFailed) as caught:
        for check in some or ALL:
            check(student)
    return str(caught.value)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_solution_passes(check, seed, capfd):
    check(function(source(), "my_policy", FlashAttentionConfig=FlashAttentionConfig), seed=seed)
    said = capfd.readouterr()
    assert said.out.startswith("[ok]")
    assert said.err == ""


OTHER_WAYS = {
    "float32 stream everywhere": [(NEW, NEW + "residual=torch.float32")],
    "float32 norms": [(NEW, NEW + 'norm_weights="float32"'), ("residual=", 'norm_weights="float32", residual=')],
    "finer attention": [(NEW, NEW + "attention=torch.float16")],
    "float16's default": [("residual=torch.float32", "")],
    "loss and optimizer in 16 bits": [(NEW, NEW + "loss=torch.float16, optimizer=torch.bfloat16")],
}  # fmt: skip


@pytest.mark.parametrize("changes", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_other_right_ways_pass_without_a_warning(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for check in ALL:
            check(student_with(*changes))


MISTAKES = {
    "float16 everywhere": ([(OLD, "True")], "which float16 cannot hold. bfloat16 can", [RANGE]),
    "float16 stream": ([("residual=torch.float32", "residual=torch.float16")], "the stream is their sum", [RANGE]),
    "bfloat16 on a T4": ([(OLD, "False")], "before compute capability 8.0", [DEVICES]),
    "bfloat16 on Turing only": ([("(8, 0)", "(7, 5)")], "my_policy('cuda', (7, 5)), a T4", [DEVICES]),
    "bfloat16 stream on a V100": ([("residual=torch.float32", "residual=torch.bfloat16")], "residual is bfloat16", [DEVICES]),
    "float32 everywhere": ([(NEW, "FlashAttentionConfig.float32(")], "FlashAttention's kernels for GPUs", [DEVICES]),
    "float32 in memory": ([(NEW, "FlashAttentionConfig.float32(")], "the weights take 100%", [MEMORY]),
    "float32 MLP": ([("residual=torch.float32", "mlp=torch.float32")], "32 bits or more: mlp", [MEMORY]),
    "float32 table and head": ([(NEW, NEW + 'embedding="float32", head="float32"')], "embedding, head", [MEMORY]),
    "statistics in float16": ([(NEW, NEW + 'norm_statistics="float16"')], "squares overflow float16 from 256", [DEVICES]),
    "statistics in float16, measured": ([(NEW, NEW + 'norm_statistics="float16"')], "cannot even hold it", [RANGE]),
    "statistics in bfloat16": ([(NEW, NEW + 'norm_statistics="bfloat16"')], "bfloat16 keeps 8", [DEVICES]),
    "None compared": ([('device_type == "cuda" and ', "")], "A CPU has no compute capability", [DEVICES]),
    "the major number as text": ([("capability < (8, 0)", "str(capability[0]) < '8'")], "a B200", [RANGE]),
    "a dtype": ([(NEW, "(lambda: torch.bfloat16)(")], "not dtype", [DEVICES]),
    "the class": ([("FlashAttentionConfig.bfloat16()", "FlashAttentionConfig")], "return a FlashAttentionConfig, such as", [DEVICES]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said", "some"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_gets_its_own_diagnosis(changes, said, some):
    assert said in diagnosis(student_with(*changes), *some)


def test_logits_that_are_finite_and_far_off_are_refused(monkeypatch):
    monkeypatch.setattr("labsupport.checks.policies.LARGEST_ERROR", 0.005)
    assert "the logits differ from float32's by 1." in diagnosis(student_with(), RANGE)


def test_a_stub_is_called_one():
    def my_policy(device_type, capability):
        raise NotImplementedError

    assert "not written yet" in diagnosis(my_policy)


def test_the_random_state_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    RANGE(student_with(), seed=17)
    assert torch.equal(torch.rand(1), expected)
