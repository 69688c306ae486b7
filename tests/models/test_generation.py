"""Generation: the same tokens as Transformers', each phase timed, every input refused or right."""

import math
import time
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labsupport.models.generation.generate import generate, prefill_and_decode
from labsupport.models.generation.memory import MemorySampler
from labsupport.models.generation.prompts import batch_of, encode
from labsupport.models.integration.select import set_attention
from tests.models.tiny import tiny

ROWS = [[5, 9, 17, 3, 44, 21], [7, 8], [11, 2, 3, 4, 9]]
TEXTS = [" ".join(f"w{token:02}" for token in row) for row in ROWS]


def words(vocabulary=61, **special):
    """A tokenizer whose token 7 is the word 'w07'."""
    table = {f"w{n:02}": n for n in range(vocabulary)}
    made = Tokenizer(models.WordLevel(table, unk_token="w00"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w00", **special)


def lively(family, **options):
    """A tiny model that does not repeat itself at once."""
    deep = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    return tiny(family, tie_word_embeddings=False, **deep, **options)


@pytest.fixture
def tokenizer():
    return words(bos_token="w01", eos_token="w59", pad_token="w00")


@pytest.fixture(scope="module")
def llama():
    return lively("llama")


def transformers_own(model, batch, count):
    done = model.generate(
        batch.ids,
        attention_mask=torch.ones_like(batch.ids)
        if batch.mask(batch.width) is None
        else batch.mask(batch.width),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return done[:, batch.width :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_tokens_are_those_of_transformers_own_generate(family, cache):
    model = lively(family)
    for rows in (ROWS, ROWS[1:2]):
        batch = batch_of(rows, "cpu")
        expected = transformers_own(model, batch, 20)
        assert prefill_and_decode(model, batch, 20, cache=cache).tokens == expected
        assert len({token for row in expected for token in row}) > 5  # not one word repeated


@pytest.mark.parametrize("cache", ["dynamic", "static", "graphed"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_batch_gives_what_its_rows_give_alone(family, cache, tokenizer):
    model = lively(family)
    together = generate(model, tokenizer, TEXTS, max_new_tokens=12, cache=cache)
    alone = [generate(model, tokenizer, text, max_new_tokens=12, cache=cache) for text in TEXTS]
    assert together.texts == [one.text for one in alone]
    assert together.prompt_tokens == (6, 2, 5)


def test_the_text_is_that_of_the_new_tokens_only(llama, tokenizer):
    done = generate(llama, tokenizer, TEXTS[0], max_new_tokens=5)
    assert done.text == " ".join(f"w{token:02}" for token in done.token_ids[0])
    assert done.new_tokens == 5


def test_the_prefill_is_one_forward_with_one_row_of_logits(llama, tokenizer):
    shapes = []
    hook = llama.lm_head.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape)))
    generate(llama, tokenizer, TEXTS, max_new_tokens=3)
    hook.remove()
    assert shapes == [(3, 1, 61)] * 3


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


def test_the_clock_covers_the_forward(llama, tokenizer):
    hook = llama.lm_head.register_forward_hook(lambda *call: time.sleep(0.02))
    done = generate(llama, tokenizer, TEXTS[0], max_new_tokens=3)
    hook.remove()
    assert done.prefill_s >= 0.02
    assert all(seconds >= 0.02 for seconds in done.step_s)
    assert done.decode_s >= 0.04


def test_no_new_tokens_is_a_prefill_alone(llama, tokenizer):
    for cache in ("dynamic", "static", "graphed"):
        done = generate(llama, tokenizer, TEXTS, max_new_tokens=0, cache=cache)
        assert done.texts == ["", "", ""]
        assert done.prefill_s > 0
        assert done.decode_s == 0
        assert math.isnan(done.decode_tokens_per_s)
        assert "decode   " not in str(done)


def test_each_row_stops_at_its_own_end_and_the_loop_when_all_have(llama, tokenizer):
    free = generate(llama, tokenizer, TEXTS, max_new_tokens=30).token_ids
    end = free[1][3]
    assert end not in free[1][:3]
    assert end not in free[0][:4]  # another row goes on behind it
    ending = words(eos_token=f"w{end:02}", pad_token="w00")
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    for cache in ("dynamic", "graphed"):
        done = generate(llama, ending, TEXTS, max_new_tokens=30, cache=cache)
        assert done.token_ids == cut
        alone = generate(llama, ending, TEXTS[1], max_new_tokens=30, cache=cache)
        assert alone.token_ids == [free[1][:4]]
        assert f"w{end:02}" not in alone.text.split()
    assert len(generate(llama, ending, TEXTS[1], max_new_tokens=30).step_s) == 3
    whole = generate(llama, ending, TEXTS, max_new_tokens=30, stop_at_end=False)
    assert whole.token_ids == free


def test_the_ends_of_the_models_own_settings_come_first(tokenizer):
    model = lively("llama")
    free = generate(model, tokenizer, TEXTS[1], max_new_tokens=10).token_ids[0]
    model.generation_config.eos_token_id = [60, free[3]]
    done = generate(model, tokenizer, TEXTS[1], max_new_tokens=10)
    assert done.token_ids[0] == free[:4]


def test_the_same_seed_gives_the_same_sample(llama, tokenizer):
    def sample(seed, **options):
        options = {"temperature": 1.0, "max_new_tokens": 20} | options
        return generate(llama, tokenizer, TEXTS, seed=seed, **options).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    greedy = generate(llama, tokenizer, TEXTS, max_new_tokens=20).token_ids
    assert sample(1) != greedy
    assert sample(1, top_k=1) == greedy
    assert sample(1, temperature=1e-4) == greedy


def test_top_k_samples_among_the_k_likeliest_only(llama, tokenizer):
    batch = encode(tokenizer, TEXTS[0], "cpu")
    likeliest = set(llama(batch.ids).logits[0, -1].topk(3).indices.tolist())
    firsts = {
        generate(
            llama, tokenizer, TEXTS[0], max_new_tokens=1, temperature=9.0, top_k=3, seed=seed
        ).token_ids[0][0]
        for seed in range(40)
    }
    assert firsts == likeliest


def test_an_empty_prompt_begins_with_the_token_that_begins_texts(llama, tokenizer):
    empty = generate(llama, tokenizer, "", max_new_tokens=6)
    assert empty.token_ids == generate(llama, tokenizer, "w01", max_new_tokens=6).token_ids
    assert empty.prompt_tokens == (1,)
    both = generate(llama, tokenizer, ["", TEXTS[0]], max_new_tokens=6)
    assert both.token_ids[0] == empty.token_ids[0]
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(llama, words(), "")


def test_a_tokenizer_without_padding_pads_all_the_same(llama, tokenizer):
    expected = generate(llama, tokenizer, TEXTS, max_new_tokens=6).token_ids
    assert generate(llama, words(eos_token="w59"), TEXTS, max_new_tokens=6).token_ids == expected
    assert generate(llama, words(), TEXTS, max_new_tokens=6).token_ids == expected


def test_what_does_not_fit_the_positions_is_refused_before_anything_runs(tokenizer):
    model = tiny("llama", max_position_embeddings=16)
    ran = []
    model.register_forward_pre_hook(lambda *call: ran.append(1))
    with pytest.raises(ValueError, match="17 tokens, and the model has 16 positions"):
        generate(model, tokenizer, "w02 " * 17, max_new_tokens=0)
    with pytest.raises(ValueError, match=r"are 17, and .* 16 positions: pass max_new_tokens=4"):
        generate(model, tokenizer, [TEXTS[0], "w02 " * 12], max_new_tokens=5)
    assert not ran
    assert generate(model, tokenizer, "w02 " * 12, max_new_tokens=4).new_tokens == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"cache": "paged"}, "dynamic, static, graphed, got 'paged'"),
        ({"temperature": -0.5}, "got -0.5"),
        ({"top_k": 5}, "needs a temperature"),
        ({"top_k": 0, "temperature": 1.0}, "1 or more"),
        ({"cache": "graphed", "temperature": 1.0}, "greedy"),
        ({"chat": True}, "has none"),
        ({"prompts": []}, "no prompt"),
    ],
)
def test_options_that_make_no_sense_are_refused(llama, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        generate(llama, tokenizer, **({"prompts": TEXTS} | options))


def test_prompts_that_are_no_texts_and_models_that_are_not_ready_are_refused(tokenizer):
    model = tiny("llama")
    with pytest.raises(TypeError, match="int was given: 5"):
        generate(model, tokenizer, ["w03", 5])
    with pytest.raises(ValueError, match="without a tokenizer"):
        generate(model, None, "w03")
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        generate(model.train(), tokenizer, "w03")


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
        held = torch.ones(size // 4)
        time.sleep(0.05)
        del held
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
