"""Exercises that are judged inside a model: 2-2 (an attention function) and 2-5 (a policy)."""

import warnings

import pytest
import torch

from labsupport import checks
from labsupport.checks.ex_2_2_own_attention import decode, small_models, use_attention
from tests.checks.solutions import diagnosis, function, solution_source
from tests.checks.test_exercises import POLICY

VALUES, MODELS = checks.check_registered_values, checks.check_registered_models
MEMORY, REFUSALS = checks.check_registered_memory, checks.check_registered_refusals
DEVICES, RANGE, POLICY_MEMORY = POLICY
INPUTS = "(x.transpose(1, 2) for x in (query, key, value))"
CALL = "flash_attention(q, k, v, causal=causal, softmax_scale=scaling)"
NO_MASK = 'raise ValueError("lab_attention takes no mask: give it texts without padding.")'


def own(*edit):
    return function(solution_source("ex-2-2-own-attention"), "lab_attention", *edit)


def policy(*edit):
    return function(solution_source("ex-2-5-policy"), "my_policy", *edit)


OWN = {
    "not transposed": (VALUES, (INPUTS, "(query, key, value)"), "transpose q, k and v before"),
    "transposed back": (VALUES, (CALL, CALL + ".transpose(1, 2)"), "do not transpose its result"),
    "one value": (MODELS, ("scaling), None", "scaling)"), "return out, None"),
    "weights": (VALUES, ("scaling), None", "scaling), query"), "FlashAttention never stores"),
    "the textbook": (
        MEMORY, (CALL, CALL.replace("flash_a", "a").replace("scaling)", "scaling, backend='standard')")), "This is textbook attention"
    ),
    "repeated keys": (
        MEMORY, (INPUTS, f"(x.repeat_interleave(query.shape[1] // x.shape[2], 2) for x in {INPUTS})"), "was repeated to 4 heads"
    ),
    "mask ignored": (REFUSALS, ("if attention_mask is not None", "if False"), "look at the padding"),
    "None": (REFUSALS, (NO_MASK, "return None"), "Raise a ValueError if attention_mask"),
    "dropout ignored": (REFUSALS, ("if dropout != 0", "if False"), "Raise a ValueError if dropout"),
    "accident": (REFUSALS, (NO_MASK, "return attention_mask + 'x'"), "by accident (TypeError"),
}  # fmt: skip


@pytest.mark.parametrize(("check", "edit", "said"), OWN.values(), ids=OWN)
def test_a_wrong_attention_function_is_refused(check, edit, said):
    assert said in diagnosis(check, own(*edit))


def test_a_small_model_gets_a_mask_for_padding_only_and_keeps_its_own_attention():
    given = []

    def watch(module, query, key, value, attention_mask, **options):
        given.append(attention_mask)
        return torch.zeros_like(query).transpose(1, 2), None

    models = small_models()
    before = decode(models["Llama"], "eager")
    decode(models["Llama"], watch)
    decode(models["BERT"], watch, (10,))
    assert given == [None] * (3 * 2 + 2)
    given.clear()
    ids, padding = torch.ones(2, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with use_attention(models["Llama"], watch), torch.no_grad():
        models["Llama"](ids, attention_mask=padding)
    assert [mask.shape for mask in given] == [(2, 1, 4, 4)] * 2
    assert not given[0][0, 0, :, 0].any()
    assert models["Llama"].config._attn_implementation == "eager"
    assert torch.equal(decode(models["Llama"], "eager"), before)


NEW, HALF = 'device_type == "cpu" or capability >= (8, 0)', "dict.fromkeys(parts, torch.float16)"


def default(arguments):
    return "FlashAttentionConfig()", f"FlashAttentionConfig({arguments})"


RIGHT = {
    "float32 stream everywhere": default("residual=torch.float32"),
    "float32 norms": default('norm_weights="float32"'),
    "float16's default": ("(**half, residual=torch.float32)", ".float16()"),
    "others in 16 bits": default("loss=torch.float16, optimizer=torch.bfloat16"),
}


@pytest.mark.parametrize("edit", RIGHT.values(), ids=RIGHT)
def test_other_right_policies_pass_without_a_warning(edit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for check in POLICY:
            check(policy(*edit))


POLICIES = {
    "float16 everywhere": (RANGE, (NEW, "False"), "float16 cannot hold it. bfloat16 can"),
    "float16 stream": (RANGE, ("residual=torch.float32", "residual=torch.float16"), "the stream is their sum"),
    "bfloat16 on a T4": (DEVICES, (NEW, "True"), "have no tensor cores and no attention kernels for it"),
    "bfloat16 on Turing": (DEVICES, ("(8, 0)", "(7, 5)"), "my_policy('cuda', (7, 5)), a T4"),
    "bfloat16 stream on a V100": (DEVICES, ("residual=torch.float32", "residual=torch.bfloat16"), "residual is bfloat16. GPUs before compute capability 8.0 have no arithmetic for it"),
    "float32 everywhere": (DEVICES, ("FlashAttentionConfig()", "FlashAttentionConfig.float32()"), "FlashAttention's kernels for GPUs"),
    "float32 in memory": (POLICY_MEMORY, ("FlashAttentionConfig()", "FlashAttentionConfig.float32()"), "the weights take 100%"),
    "float32 MLP": (POLICY_MEMORY, (HALF, HALF + " | {'mlp': torch.float32}"), "32 bits or more: mlp"),
    "float32 table and head": (POLICY_MEMORY, default('embedding="float32", head="float32"'), "embedding, head"),
    "float16 statistics": (DEVICES, default('norm_statistics="float16"'), "squares overflow float16 from 256"),
    "float16 statistics, measured": (RANGE, default('norm_statistics="float16"'), "cannot even hold it"),
    "None compared": (DEVICES, ('device_type == "cpu" or ', ""), "A CPU has no compute capability"),
    "the major number as text": (RANGE, ("capability >= (8, 0)", "str(capability[0]) >= '8'"), "a B200"),
    "a dtype": (DEVICES, ("FlashAttentionConfig()", "torch.bfloat16"), "not a dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("check", "edit", "said"), POLICIES.values(), ids=POLICIES)
def test_a_wrong_policy_is_refused(check, edit, said):
    assert said in diagnosis(check, policy(*edit))


def test_logits_that_are_finite_and_far_off_are_refused(monkeypatch):
    monkeypatch.setattr("labsupport.checks.ex_2_5_policy.LARGEST_ERROR", 0.005)
    assert "the logits differ from float32's by 1." in diagnosis(RANGE, policy())


def test_the_random_state_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    RANGE(policy(), seed=17)
    assert torch.equal(torch.rand(1), expected)
