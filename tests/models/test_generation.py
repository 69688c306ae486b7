"""Generation: the same tokens as Transformers', each phase timed, every input refused or right."""

import math
import time
from dataclasses import replace

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labsupport.models.generation.compare import compare_attention
from labsupport.models.generation.generate import generate, prefill_and_decode
from labsupport.models.generation.memory import MemorySampler
from labsupport.models.generation.prompts import batch_of, encode
from labsupport.models.integration import set_attention
from tests.models.tiny import ROWS, TEXTS, lively, tiny, words


@pytest.fixture
def tokenizer():
    return words(bos_token="w01", eos_token="w59", pad_token="w00")


@pytest.fixture(scope="module")
def llama():
    return lively("llama")


@pytest.mark.parametrize(
    ("family", "cache"), [("llama", "dynamic"), ("gpt2", "static"), ("mistral", "static")]
)
def test_the_tokens_are_those_of_transformers_own_generate(family, cache):
    model = lively(family, noise=0.0)
    for rows in (ROWS, ROWS[1:2]):
        batch = batch_of(rows, "cpu")
        mask = batch.mask(batch.width)
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(batch.ids) if mask is None else mask
        expected = model.generate(batch.ids, attention_mask=mask, eos_token_id=None, **options)
        expected = expected[:, batch.width :].tolist()
        assert prefill_and_decode(model, batch, 20, cache=cache).tokens == expected
        assert len({token for row in expected for token in row}) > 5  # not one word repeated


@pytest.mark.parametrize(
    ("family", "cache"), [("llama", "dynamic"), ("llama", "graphed"), ("gpt2", "static")]
)
def test_a_batch_gives_what_its_rows_give_alone(family, cache, tokenizer):
    model = lively(family)
    together = generate(model, tokenizer, TEXTS, max_new_tokens=12, cache=cache)
    alone = [generate(model, tokenizer, text, max_new_tokens=12, cache=cache) for text in TEXTS]
    assert together.texts == [one.text for one in alone]
    assert together.prompt_tokens == (6, 2, 5)
    assert alone[0].text == " ".join(f"w{token:02}" for token in alone[0].token_ids[0])


def test_the_prefill_is_one_forward_with_one_row_of_logits_and_the_clock_covers_it(
    llama, tokenizer
):
    shapes = []

    def slow(module, args, out):
        shapes.append(tuple(out.shape))
        time.sleep(0.02)

    hook = llama.lm_head.register_forward_hook(slow)
    done = generate(llama, tokenizer, TEXTS, max_new_tokens=3)
    hook.remove()
    assert shapes == [(3, 1, 61)] * 3
    assert min(done.prefill_s, *done.step_s) >= 0.02
    assert done.decode_s >= 0.04


def test_rates_count_the_first_token_with_the_prefill_and_no_padding(llama, tokenizer):
    seen = []
    done = generate(
        llama, tokenizer, TEXTS, max_new_tokens=4, on_step=lambda *step: seen.append(step)
    )
    assert [step for step, _, _ in seen] == [0, 1, 2, 3]
    assert tuple(seconds for _, _, seconds in seen) == (done.prefill_s, *done.step_s)
    assert torch.stack([tokens for _, tokens, _ in seen], dim=1).tolist() == done.token_ids
    done = replace(done, prefill_s=0.5, decode_s=0.25)
    assert done.prefill_tokens_per_s == 13 / 0.5
    assert done.decode_tokens_per_s == 3 * 3 / 0.25


@pytest.mark.parametrize("cache", ["dynamic", "static", "graphed"])
def test_no_new_tokens_is_a_prefill_alone(llama, tokenizer, cache):
    done = generate(llama, tokenizer, TEXTS, max_new_tokens=0, cache=cache)
    assert done.texts == ["", "", ""]
    assert done.prefill_s > 0
    assert done.decode_s == 0
    assert math.isnan(done.decode_tokens_per_s)
    assert "decode   " not in str(done)


def test_each_row_stops_at_its_own_end_and_the_loop_when_all_have(llama, tokenizer):
    free = generate(llama, tokenizer, TEXTS, max_new_tokens=30).token_ids
    at = next(n for n in range(2, 30) if free[1][n] not in [*free[1][:n], *free[0][: n + 1]])
    end = free[1][at]  # another row goes on beyond it
    ending = words(eos_token=f"w{end:02}", pad_token="w00")
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    for cache in ("dynamic", "graphed"):
        done = generate(llama, ending, TEXTS, max_new_tokens=30, cache=cache)
        assert done.token_ids == cut
        alone = generate(llama, ending, TEXTS[1], max_new_tokens=30, cache=cache)
        assert alone.token_ids == [free[1][: at + 1]]
        assert f"w{end:02}" not in alone.text.split()
    assert len(generate(llama, ending, TEXTS[1], max_new_tokens=30).step_s) == at
    whole = generate(llama, ending, TEXTS, max_new_tokens=30, stop_at_end=False)
    assert whole.token_ids == free


def test_the_ends_of_the_models_own_settings_come_first(tokenizer):
    model = lively("llama")
    free = generate(model, tokenizer, TEXTS[1], max_new_tokens=10).token_ids[0]
    model.generation_config.eos_token_id = [60, free[3]]
    done = generate(model, tokenizer, TEXTS[1], max_new_tokens=10)
    assert done.token_ids[0] == free[: free.index(free[3]) + 1]


def test_the_same_seed_gives_the_same_sample(llama, tokenizer):
    def sample(seed, **options):
        options = {"temperature": 1.0, "max_new_tokens": 10} | options
        return generate(llama, tokenizer, TEXTS, seed=seed, **options).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    greedy = generate(llama, tokenizer, TEXTS, max_new_tokens=10).token_ids
    assert sample(1) != greedy
    assert sample(1, top_k=1) == sample(1, temperature=1e-4) == greedy


def test_top_k_samples_among_the_k_likeliest_only(llama, tokenizer):
    batch = encode(tokenizer, TEXTS[0], "cpu")
    likeliest = set(llama(batch.ids).logits[0, -1].topk(3).indices.tolist())
    options = {"max_new_tokens": 1, "temperature": 9.0, "top_k": 3, "seed": 0}
    copies = generate(llama, tokenizer, [TEXTS[0]] * 40, **options)
    assert {row[0] for row in copies.token_ids} == likeliest


def test_an_empty_prompt_begins_with_the_token_that_begins_texts(llama, tokenizer):
    empty = generate(llama, tokenizer, "", max_new_tokens=6)
    assert empty.token_ids == generate(llama, tokenizer, "w01", max_new_tokens=6).token_ids
    assert empty.prompt_tokens == (1,)
    with pytest.raises(ValueError, match="makes no token"):
        generate(llama, words(), "")
    # Without an unknown token, a tokenizer drops what it does not know.
    table = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2}, []))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    dropping = PreTrainedTokenizerFast(tokenizer_object=table, bos_token="<s>")
    assert encode(dropping, ["ab", ""], "cpu").ids.tolist() == [[0, 1], [0, 2]]
    with pytest.raises(ValueError, match="makes no token of the text 'xyz'"):
        encode(dropping, ["ab", "xyz"], "cpu")


def test_a_tokenizer_without_padding_still_pads(llama, tokenizer):
    expected = generate(llama, tokenizer, TEXTS, max_new_tokens=6).token_ids
    assert generate(llama, words(), TEXTS, max_new_tokens=6).token_ids == expected


def test_what_does_not_fit_the_model_is_refused_before_anything_runs(tokenizer):
    model = tiny("llama", max_position_embeddings=16)
    ran = []
    model.register_forward_pre_hook(lambda *call: ran.append(1))
    with pytest.raises(ValueError, match=r"12 tokens of text and 5 new .* 16 positions"):
        generate(model, tokenizer, [TEXTS[0], "w02 " * 12], max_new_tokens=5)
    for cache in ("dynamic", "graphed"):
        with pytest.raises(ValueError, match=r"a token 70, and the model's embedding has 61 rows"):
            generate(model, words(80), "w05 w70", cache=cache)
    with pytest.raises(ValueError, match=r"a token 79, .* does not belong to this model"):
        generate(model, words(80, pad_token="w79"), TEXTS, max_new_tokens=2)
    assert not ran
    assert generate(model, tokenizer, "w02 " * 12, max_new_tokens=4).new_tokens == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"cache": "paged"}, "dynamic, static, graphed, got 'paged'"),
        ({"temperature": -0.5}, "got -0.5"),
        ({"temperature": math.nan}, "and finite, got nan"),
        ({"temperature": math.inf}, "and finite, got inf"),
        ({"top_k": 5}, "needs a temperature"),
        ({"top_k": 0, "temperature": 1.0}, "1 or more"),
        ({"cache": "graphed", "temperature": 1.0}, "greedy"),
        ({"chat": True}, "chat template"),
        ({"prompts": []}, "no prompt"),
        ({"tokenizer": None}, "without a tokenizer"),
    ],
)
def test_options_that_make_no_sense_are_refused(llama, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        generate(llama, **({"tokenizer": tokenizer, "prompts": TEXTS} | options))


def test_models_and_prompts_of_another_kind_are_refused(tokenizer):
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, num_heads=2))
    for model in (tiny("bert"), tiny("llama").model, t5):
        for run in (generate, compare_attention):
            with pytest.raises(ValueError, match=f"{type(model).__name__} does not continue texts"):
                run(model.eval(), tokenizer, "w05")
    with pytest.raises(TypeError, match="int was given: 5"):
        generate(tiny("llama"), tokenizer, ["w03", 5])
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        generate(tiny("llama").train(), tokenizer, "w03")


def test_chat_wraps_the_prompt_by_the_template(llama, tokenizer):
    tokenizer.chat_template = (
        "w01 {% for m in messages %}w40 {{ m['content'] }} w41 {% endfor %}"
        "{% if add_generation_prompt %}w42{% endif %}"
    )
    chat = generate(llama, tokenizer, "w07 w08", max_new_tokens=5, chat=True)
    plain = generate(llama, tokenizer, "w01 w40 w07 w08 w41 w42", max_new_tokens=5)
    assert chat.prompt_tokens == (6,)
    assert chat.token_ids == plain.token_ids


def test_the_report_names_the_attention_that_ran_in_this_call(tokenizer):
    model = tiny("llama")
    assert "Transformers' own (eager)" in str(generate(model, tokenizer, "w03", max_new_tokens=2))
    set_attention(model, "sdpa_flash")
    generate(model, tokenizer, "w03", max_new_tokens=5)
    done = generate(model, tokenizer, "w03", max_new_tokens=3)
    assert [(use.layer, use.backend, use.calls) for use in done.attention] == [
        (0, "sdpa_flash", 3),
        (1, "sdpa_flash", 3),
    ]
    assert "FlashAttention (sdpa_flash: " in str(done)
    assert "in layers 0-1" in str(done)
    set_attention(model, "standard")
    report = str(generate(model, tokenizer, "w03", max_new_tokens=3))
    assert "standard attention (standard: " in report
    assert "FlashAttention" not in report


def test_the_memory_of_a_block_is_its_peak_and_its_average_beyond_the_start():
    size = 64 * 2**20
    with MemorySampler(torch.device("cpu"), interval_s=0.002) as memory:
        block = torch.ones(size // 4)
        time.sleep(0.05)
        del block
        time.sleep(0.15)
    assert 0.9 * size < memory.peak_bytes < 1.5 * size
    assert 0.05 * size < memory.mean_bytes < 0.7 * size
    assert "resident" in memory.what


def test_a_real_model_answers_alike_with_every_cache(smollm2):
    question = "What is the capital of France? Answer with one word."
    answers = {
        cache: generate(
            smollm2.model, smollm2.tokenizer, question, chat=True, max_new_tokens=8, cache=cache
        )
        for cache in ("dynamic", "static", "graphed")
    }
    assert "Paris" in answers["dynamic"].text
    assert len({answer.text for answer in answers.values()}) == 1
    assert answers["dynamic"].token_ids[0][-1] == smollm2.tokenizer.eos_token_id
