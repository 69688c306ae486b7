"""Generation: Transformers' tokens, timed, also by the fast loop, and by two kinds of attention."""

import io
import math
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from labsupport.models.generation import compare, cuda_graph
from labsupport.models.generation.compare import compare_attention, oracle_logits, prompt_logits
from labsupport.models.generation.cuda_graph import GraphedDecoder
from labsupport.models.generation.generate import fastest_cache, generate, prefill_and_decode
from labsupport.models.generation.memory_sampler import MemorySampler
from labsupport.models.generation.prompts import Sampler, batch_of, encode
from labsupport.models.integration import register_attention, set_attention
from tests.attention.cases import needs_interpreter
from tests.models.tiny import ROWS, TEXTS, lively, own, tiny, words


@pytest.fixture(scope="module")
def tokenizer():
    return words(bos_token="w01", eos_token="w59", pad_token="w00")


@pytest.fixture(scope="module")
def llama():
    return lively("llama")


@pytest.mark.parametrize(("family", "cache"), [("llama", "dynamic"), ("gpt2", "static")])
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


def test_each_forward_has_one_row_of_logits_and_its_time_counts(llama, tokenizer):
    shapes, seen = [], []

    def slow(module, args, out):
        shapes.append(tuple(out.shape))
        time.sleep(0.02)

    hook = llama.lm_head.register_forward_hook(slow)
    done = generate(
        llama, tokenizer, TEXTS, max_new_tokens=4, on_step=lambda *step: seen.append(step)
    )
    hook.remove()
    assert shapes == [(3, 1, 61)] * 4
    assert min(done.prefill_s, *done.step_s) >= 0.02
    assert done.decode_s >= 0.06
    assert done.text == " ".join(f"w{token:02}" for token in done.token_ids[0])
    assert done.prompt_tokens == (6, 2, 5)
    assert [step for step, _, _ in seen] == [0, 1, 2, 3]
    assert tuple(seconds for _, _, seconds in seen) == (done.prefill_s, *done.step_s)
    assert torch.stack([tokens for _, tokens, _ in seen], dim=1).tolist() == done.token_ids
    done = replace(done, prefill_s=0.5, decode_s=0.25)
    assert done.prefill_tokens_per_s == 13 / 0.5
    assert done.decode_tokens_per_s == 3 * 3 / 0.25


def test_each_row_stops_at_its_own_end_and_the_loop_when_all_have(llama, tokenizer):
    free = generate(llama, tokenizer, TEXTS, max_new_tokens=30).token_ids
    at = next(n for n in range(2, 30) if free[1][n] not in [*free[1][:n], *free[0][: n + 1]])
    end = free[1][at]  # another row goes on beyond it
    ending = words(eos_token=f"w{end:02}", pad_token="w00")
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert generate(llama, ending, TEXTS, max_new_tokens=30).token_ids == cut
    alone = generate(llama, ending, TEXTS[1], max_new_tokens=30)
    assert alone.token_ids == [free[1][: at + 1]]
    assert f"w{end:02}" not in alone.text.split()
    assert len(alone.step_s) == at
    whole = generate(llama, ending, TEXTS, max_new_tokens=30, stop_at_end=False)
    assert whole.token_ids == free


def test_a_comparison_shows_a_bar_on_a_terminal(llama, tokenizer, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    compare_attention(llama, tokenizer, TEXTS[1], max_new_tokens=1, repeats=1)
    assert "0/5 [" in terminal.getvalue()  # before the oracle, which takes longest


@pytest.mark.parametrize(
    "options",
    [{"temperature": "x"}, {"temperature": -1}, {"temperature": 1.0, "top_k": 2.5}, {"seed": "x"},
     {"max_new_tokens": "x"}, {"max_new_tokens": 2.0}],
)  # fmt: skip
def test_an_option_that_is_no_such_number_is_refused(llama, tokenizer, options):
    with pytest.raises(ValueError, match=list(options)[-1]):
        generate(llama, tokenizer, TEXTS, **options)


def test_a_seed_gives_its_sample_and_top_k_the_likeliest_only(llama, tokenizer):
    def sample(seed, **options):
        options = {"temperature": 1.0, "max_new_tokens": 10} | options
        return generate(llama, tokenizer, TEXTS, seed=seed, **options).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    greedy = generate(llama, tokenizer, TEXTS, max_new_tokens=10).token_ids
    assert sample(1) != greedy
    assert sample(1, top_k=1) == sample(1, temperature=1e-4) == greedy
    batch = encode(tokenizer, TEXTS[0], "cpu")
    likeliest = set(llama(batch.ids).logits[0, -1].topk(3).indices.tolist())
    options = {"max_new_tokens": 1, "temperature": 9.0, "top_k": 3}
    copies = generate(llama, tokenizer, [TEXTS[0]] * 40, **options)
    assert {row[0] for row in copies.token_ids} == likeliest


def test_what_does_not_fit_the_model_is_refused_before_anything_runs(tokenizer):
    model = tiny("llama", max_position_embeddings=16)
    ran = []
    model.register_forward_pre_hook(lambda *call: ran.append(1))
    with pytest.raises(ValueError, match=r"12 tokens of text and 5 new .* 16 positions"):
        generate(model, tokenizer, [TEXTS[0], "w02 " * 12], max_new_tokens=5)
    with pytest.raises(ValueError, match=r"a token 70, and the model's embedding has 61 rows"):
        generate(model, words(80), "w05 w70")
    with pytest.raises(ValueError, match="the graphed loop needs a GPU"):
        generate(model, tokenizer, "w02", cache="graphed")
    assert not ran
    assert generate(model, tokenizer, "w02 " * 12, max_new_tokens=4).new_tokens == 4


def test_the_memory_of_a_block_is_its_peak_and_its_average_beyond_the_start():
    size = 256 * 2**20  # large beside pages that a busy system takes back
    with MemorySampler(torch.device("cpu"), interval_s=0.001) as memory:
        block = torch.ones(size // 4)
        while len(memory._samples) < 10:
            time.sleep(0.001)
        del block
        while len(memory._samples) < 30:
            time.sleep(0.001)
    assert 0.9 * size < memory.peak_bytes < 1.5 * size
    assert 0.05 * size < memory.mean_bytes < 0.7 * size
    assert "resident" in memory.what


def test_a_real_model_answers_alike_with_every_cache_in_a_chat(smollm2):
    question = "What is the capital of France? Answer with one word."
    answers = {
        cache: generate(
            smollm2.model, smollm2.tokenizer, question, chat=True, max_new_tokens=8, cache=cache
        )
        for cache in ("dynamic", "static")
    }
    assert "Paris" in answers["dynamic"].text
    assert len({answer.text for answer in answers.values()}) == 1
    assert answers["dynamic"].token_ids[0][-1] == smollm2.tokenizer.eos_token_id


# --- the fast loop --------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHARED = {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 16}


@needs_interpreter
@pytest.mark.parametrize("rows", [ROWS, ROWS[1:2]], ids=["rows", "one row"])
@pytest.mark.parametrize("options", [{}, SHARED | {"rope_parameters": LLAMA3}], ids=["", "shared"])
def test_the_logits_of_a_step_and_the_tokens_are_those_of_the_model(options, rows):
    model = lively("llama", num_hidden_layers=1, **options)
    batch = batch_of(rows, "cpu")
    decoder = GraphedDecoder(model, batch=len(rows), length=9)
    tokens = decoder.run(batch, 3).tokens
    assert tokens == prefill_and_decode(model, batch, 3).tokens
    for logits, row, new in zip(decoder.step.logits, rows, tokens, strict=True):
        expected = model(torch.tensor([row + new[:-1]])).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@needs_interpreter
def test_a_graphed_decoder_is_used_again_and_notices_the_end_of_all_rows(monkeypatch):
    monkeypatch.setattr(cuda_graph, "CHECK_EVERY", 2)
    model, batch = lively("llama", num_hidden_layers=1), batch_of(ROWS, "cpu")
    decoder = GraphedDecoder(model, batch=3, length=10)
    with pytest.raises(ValueError, match=r"3 rows of 10 tokens, but 3 of 6 \+ 5 were given"):
        decoder.run(batch, 5)
    steps, advance = [], decoder._advance
    decoder._advance = lambda: (steps.append(1), advance())
    free = prefill_and_decode(model, batch, 4).tokens
    ends = {row[1] for row in free}
    done = decoder.run(batch, 4, ends=tuple(ends)).tokens
    assert done == prefill_and_decode(model, batch, 4, ends=tuple(ends)).tokens
    assert len(steps) == 2
    other = batch_of(ROWS[::-1], "cpu")
    assert decoder.run(other, 2).tokens == prefill_and_decode(model, other, 2).tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_on_a_gpu_a_replayed_graph_computes_the_same():
    model, batch = lively("llama").cuda(), batch_of(ROWS, "cuda")
    assert fastest_cache(model) == "graphed"
    assert fastest_cache(model, steps=True) == fastest_cache(lively("gpt2").cuda()) == "dynamic"
    decoder = GraphedDecoder(model, batch=3, length=46)
    for _ in range(2):
        assert decoder.run(batch, 40).tokens == prefill_and_decode(model, batch, 40).tokens
    sample = Sampler(model.device, temperature=1.0, top_k=20, seed=1)
    decoder = GraphedDecoder(model, batch=3, length=46, sample=sample)
    one, same = (decoder.run(batch, 40).tokens for _ in range(2))
    sample.seed = 2
    assert one == same != decoder.run(batch, 40).tokens


# --- two kinds of attention -----------------------------------------------------------------------


def compared(model, backends, tokens=2):
    tokenizer = words(bos_token="w01", pad_token="w00")
    options = {"backends": backends, "max_new_tokens": tokens, "repeats": 1}
    return compare_attention(model, tokenizer, TEXTS[0], **options)


@pytest.mark.parametrize(("family", "backend"), [("gpt2", "flash"), ("llama", "flash_torch")])
def test_flash_and_standard_attention_agree(family, backend):
    found = compared(lively(family), ("standard", backend), 12)
    assert found.agree
    assert found.same_text
    assert 0 < found.table.max_error.iloc[1] <= found.bound < 1e-3
    assert found.max_difference < 1e-4
    assert list(found.table.backend) == ["standard", backend]
    assert (found.table.prefill_peak_bytes > 0).all()
    assert (found.table.decode_tokens_per_s > 0).all()
    assert "text:   the same 12 tokens" in str(found)
    assert "is within" in str(found)


def test_texts_that_part_are_judged_by_the_gap_of_the_two_logits():
    model = lively("llama")
    slightly = compared(
        model, ("standard", register_attention("slightly_wrong", partial(own, by=1e-3)))
    )
    assert not slightly.agree
    assert not slightly.logits_agree
    assert "OUTSIDE" in str(slightly)
    backends = ("standard", register_attention("quite_wrong", partial(own, by=0.5)))
    found = compared(model, backends, 20)
    standard, other = (found.generations[b].token_ids[0] for b in backends)
    index = found.parted_at
    assert standard[:index] == other[:index]
    assert standard[index] != other[index]
    set_attention(model, "standard")
    with torch.no_grad():
        logits = model(torch.tensor([ROWS[0] + standard[:index]])).logits[0, -1]
    gap = float(logits[standard[index]] - logits[other[index]])
    assert found.gap == pytest.approx(gap, abs=1e-4)
    assert gap > 0
    error = found.table.max_error[0]
    assert found.near_tie == pytest.approx(2 * (error + found.bound))
    assert compare.FACTOR * error < found.bound < compare.FACTOR * error + 1e-4
    within = replace(found, bound=math.inf)
    assert replace(within, near_tie=found.gap / 2).agree is False
    assert "NOT a near-tie" in str(replace(within, near_tie=found.gap / 2))
    assert replace(within, near_tie=2 * found.gap).agree is True
    with pytest.raises(ValueError, match="two different backends"):
        compared(model, ("flash", "flash"))


def test_the_oracle_computes_in_float64_throughout():
    model, batch = lively("llama"), batch_of(ROWS[:1], "cpu")
    truth, name = oracle_logits(model, batch)
    assert name == "the model in float64"
    torch.testing.assert_close(prompt_logits(model, batch), truth, rtol=1e-4, atol=1e-4)
    # An oracle that rounded to float32 on its way would lose most of this change of a weight.
    embedding = model.get_input_embeddings().weight
    embedding.data = embedding.data.double()
    embedding.data[:, 0] += 1e-11
    moved = (oracle_logits(model, batch)[0] - truth).abs()
    assert 1e-13 < moved.max() < 1e-8
    assert (moved > 0).double().mean() > 0.9
    assert model.config._attn_implementation == "eager"
