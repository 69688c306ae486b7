import pytest
import torch
import torch.nn.functional as F

from labsupport import checks
from labsupport.attention import attention, flash_attention
from labsupport.checks import registered
from labsupport.checks.small_models import decode, small_models, use_attention
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import broken, diagnosis, function, solution_source

VALUES, MODELS = checks.check_registered_values, checks.check_registered_models
MEMORY, REFUSALS = checks.check_registered_memory, checks.check_registered_refusals


def source():
    return solution_source("02", "ex-2-2-own-attention")


def solved():
    return function(source(), "lab_attention", flash_attention=flash_attention)


def student_with(*changes):
    names = {"flash_attention": flash_attention, "attention": attention, "F": F}
    return broken(source(), "lab_attention", *changes, **names)


@pytest.mark.parametrize("check", [VALUES, MODELS, REFUSALS])
@pytest.mark.parametrize("seed", [0, 5])
def test_the_solution_passes(check, seed, capfd):
    check(solved(), seed=seed)
    said = capfd.readouterr()
    assert said.out.startswith("[ok]")
    assert said.err == ""


def test_the_solution_stores_no_scores(capsys):
    MEMORY(solved())
    assert capsys.readouterr().out.startswith("[ok]")


def test_another_right_way_passes():
    def lab_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):  # fmt: skip
        if attention_mask is not None or dropout > 0:
            raise NotImplementedError("neither masks nor dropout")
        q, k, v = (x.permute(0, 2, 1, 3).contiguous() for x in (query, key, value))
        causal = module.is_causal if is_causal is None else is_causal
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention(q, k, v, causal=causal, softmax_scale=scale, backend="sdpa_flash"), None

    for check in (VALUES, MODELS, MEMORY, REFUSALS):
        check(lab_attention)


INPUTS = "(x.transpose(1, 2) for x in (query, key, value))"
CALL = "flash_attention(q, k, v, causal=causal, softmax_scale=scaling)"
OTHERS = (
    Mistake((INPUTS, "(query, key, value)"), "transpose q, k and v before"),
    Mistake((CALL, CALL + ".transpose(1, 2)"), "do not transpose it back"),
    Mistake(("softmax_scale=scaling), None", "softmax_scale=scaling)"), "return out, None"),
)


@pytest.mark.parametrize("check", [VALUES, MODELS], ids=["directly", "in models"])
@pytest.mark.parametrize("mistake", registered.MISTAKES + OTHERS, ids=lambda m: m.say[:60])
def test_each_mistake_gets_its_own_diagnosis(check, mistake):
    """The table's edits are of the lab's textbook version; they fit the notebook's solution."""
    student = student_with(*zip(mistake.edit[::2], mistake.edit[1::2], strict=True))
    if check is MODELS and mistake is registered.MISTAKES[0]:
        MODELS(student)  # none of the models gives is_causal
    else:
        assert mistake.say in diagnosis(check, student)


def test_a_module_must_be_asked_when_is_causal_is_given_as_none():
    student = student_with(
        ('kwargs.get("is_causal")', 'kwargs.get("is_causal", module.is_causal)'),
        ("if causal is None", "if False"),
    )
    message = diagnosis(VALUES, student)
    assert "is_causal=None" in message
    assert "The future is visible" in message


def test_weights_in_the_second_place_are_refused():
    student = student_with(("scaling), None", "scaling), query"))
    assert "FlashAttention stores none" in diagnosis(VALUES, student)


def test_the_textbook_in_place_of_flash_attention_is_found():
    textbook = CALL.replace("flash_attention", "attention").replace(
        "scaling)", "scaling, backend='standard')"
    )
    assert "This is textbook attention" in diagnosis(MEMORY, student_with((CALL, textbook)))


def test_repeated_keys_are_found():
    repeated = f"(x.repeat_interleave(query.shape[1] // x.shape[2], 2) for x in {INPUTS})"
    student = student_with((INPUTS, repeated))
    VALUES(student)
    assert "was repeated to 4 heads" in diagnosis(MEMORY, student)


NOT_REFUSED = {
    "mask ignored": ([("if attention_mask is not None", "if False")], "without a word"),
    "None for an answer": (
        [('raise ValueError("lab_attention takes no mask: give it texts without padding.")', "return None")],
        "Raise a ValueError when attention_mask",
    ),
    "dropout ignored": ([("if dropout != 0", "if False")], "Raise a ValueError when dropout"),
    "mask handed on": (
        [("if attention_mask is not None", "if False"), ("softmax_scale=scaling)", "softmax_scale=scaling, **({} if attention_mask is None else {'attn_mask': attention_mask}))")],
        "by accident (TypeError",
    ),
    "another function for masks": (
        [('raise ValueError("lab_attention takes no mask: give it texts without padding.")',
          "return F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True).transpose(1, 2), None")],
        "did another function compute this",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), NOT_REFUSED.values(), ids=NOT_REFUSED)
def test_what_it_cannot_do_must_be_refused(changes, said):
    assert said in diagnosis(REFUSALS, student_with(*changes))


@pytest.mark.parametrize("check", [VALUES, MODELS, MEMORY, REFUSALS])
def test_a_stub_is_called_one(check):
    def lab_attention(module, query, key, value, attention_mask, **kwargs):
        raise NotImplementedError

    assert "not written yet" in diagnosis(check, lab_attention)


def test_a_small_model_gets_a_mask_for_padding_only():
    given = []

    def watch(module, query, key, value, attention_mask, **options):
        given.append(attention_mask)
        return torch.zeros_like(query).transpose(1, 2), None

    models = small_models()
    decode(models["Llama"], watch)
    with use_attention(models["BERT"], watch), torch.no_grad():
        models["BERT"](torch.ones(1, 4, dtype=torch.long))
    assert all(mask is None for mask in given)
    assert len(given) == 3 * 2 + 2

    given.clear()
    ids, padding = torch.ones(2, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with use_attention(models["Llama"], watch), torch.no_grad():
        models["Llama"](ids, attention_mask=padding)
    assert [mask.shape for mask in given] == [(2, 1, 4, 4)] * 2
    assert not given[0][0, 0, :, 0].any()


def test_a_small_model_keeps_the_attention_that_it_had():
    model = small_models()["GPT-2"]
    before = decode(model, "eager")
    diagnosis(MODELS, student_with(("causal=causal", "causal=False")))
    assert model.config._attn_implementation == "eager"
    assert torch.equal(decode(model, "eager"), before)


def test_a_function_that_computes_nothing_does_not_pass_for_its_little_memory():
    def student(module, query, key, value, attention_mask, **options):
        return query.transpose(1, 2).clone(), None

    assert "memory counts" in diagnosis(MEMORY, student)
