"""llama2.c's tokenizer, against run.c's own procedure and against the sentencepiece package."""

import random
import struct

import pytest
import sentencepiece
import torch

from labsupport.models.llama2c.tokenizer import (
    BOS,
    FIRST_BYTE,
    read_tokenizer,
    write_tokenizer,
)
from labsupport.models.sources.text import python_topics

TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "",
    " ",
    "  two spaces, and three   inside ",
    "line\nbreak\ttab\r\n\nend\n",
    "Ünïcode: naïve café, 東京, Привет, 🙂👩‍👩‍👧 and \x00 nul",
    "digits 1234567890, 3.14",
    "def f(x):\n    return {'a': x ** 2}\n",
    "<s> </s> <unk> <0x0A> \n<s>\n",
    "supercalifragilisticexpialidocious " * 5,
]


@pytest.fixture(scope="module")
def stories(stories_folder):
    return read_tokenizer(stories_folder / "tokenizer.bin")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A SentencePiece model of 800 tokens, trained as Llama's was, on Python's help."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = "\n".join(python_topics().values()).splitlines()[:2500]
    (folder / "text.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.995,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def as_run_c_does(tokenizer, text):
    """Look through all pairs for each merge, as run.c's `encode`: the best, the first of equals."""
    pieces = tokenizer.pieces()
    tokens_by_piece = {pieces[i][0]: i for i in reversed(range(FIRST_BYTE + 256, len(pieces)))}
    tokens = []
    for character in " " + text if text else "":
        raw = character.encode()
        found = tokens_by_piece.get(raw)
        tokens += [FIRST_BYTE + byte for byte in raw] if found is None else [found]
    while True:
        best, where, what = -1e10, None, None
        for i in range(len(tokens) - 1):
            union = tokens_by_piece.get(pieces[tokens[i]][0] + pieces[tokens[i + 1]][0])
            if union is not None and pieces[union][1] > best:
                best, where, what = pieces[union][1], i, union
        if where is None:
            return [BOS, *tokens]
        tokens[where : where + 2] = [what]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_run_c(stories, text):
    assert stories.encode(text) == as_run_c_does(stories, text)


def test_tokens_are_those_of_run_c_for_random_texts_too(stories):
    draw = random.Random(0)
    for alphabet in ("ab ", "the an\n", "aá€🙂 ", "".join(map(chr, range(32, 127)))):
        for _ in range(20):
            text = "".join(draw.choices(alphabet, k=draw.randrange(1, 60)))
            assert stories.encode(text) == as_run_c_does(stories, text)


def test_a_known_sentence_has_llama_2_s_tokens(stories):
    assert stories.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    assert stories.encode("Hello world", add_special_tokens=False) == [15043, 3186]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(stories, text):
    assert stories.decode(stories.encode(text)) == text
    assert stories.decode(torch.tensor(stories.encode(text))) == text


def test_one_space_goes_after_a_bos_and_no_other(stories):
    ids = stories.encode("Once upon a time")
    assert stories.decode(ids[2:]) == " upon a time"
    assert stories.decode(stories.encode(" x")) == " x"
    assert stories.decode([BOS, FIRST_BYTE + 0xE2, FIRST_BYTE + 0x82, FIRST_BYTE + 0xAC]) == "€"
    assert stories.decode([FIRST_BYTE + 0xE2]) == "\N{REPLACEMENT CHARACTER}"
    assert stories.decode([BOS, 9038, 2], skip_special_tokens=False) == "\n<s>\nOnce\n</s>\n"


@pytest.mark.parametrize("text", TEXTS)
def test_both_files_of_a_vocabulary_give_sentencepiece_s_tokens(trained, tmp_path, text):
    by_model = read_tokenizer(trained)
    write_tokenizer(by_model, tmp_path / "tokenizer.bin")
    by_bin = read_tokenizer(tmp_path / "tokenizer.bin")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    expected = [BOS, *processor.Encode(text)]
    assert by_model.encode(text) == expected
    assert by_bin.encode(text) == expected
    assert by_bin.decode(expected) == by_model.decode(expected) == text
    assert processor.Decode(expected[1:]) == text


def test_a_long_text_gives_sentencepiece_s_tokens_in_no_time(trained, tmp_path):
    """Merging by a search through all pairs would take minutes."""
    write_tokenizer(read_tokenizer(trained), tmp_path / "tokenizer.bin")
    text = "\n".join(python_topics().values())[:100_000]
    tokens = read_tokenizer(tmp_path / "tokenizer.bin").encode(text)
    assert tokens == read_tokenizer(trained).encode(text)


def test_a_tokenizer_bin_is_written_back_byte_for_byte(stories, stories_folder, tmp_path):
    write_tokenizer(stories, tmp_path / "copy.bin")
    assert (tmp_path / "copy.bin").read_bytes() == (stories_folder / "tokenizer.bin").read_bytes()


# --- as Transformers' tokenizers are called -----------------------------------------------------


def test_a_batch_is_padded_on_the_left_and_masked(stories):
    batch = stories(["Once upon a time", "Hello"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[1, 9038, 2501, 263, 931], [2, 2, 2, 1, 15043]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.to("cpu").input_ids.shape == (2, 5)
    assert stories.batch_decode(batch.input_ids) == ["Once upon a time", "Hello"]


def test_the_batch_gives_the_answers_of_its_texts_alone(stories15m):
    texts = ["Once upon a time", "Tom had a red ball. He"]
    batch = stories15m.tokenizer(texts, padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 2}
    together = stories15m.model.generate(**batch, **settings)
    for text, row in zip(texts, together, strict=True):
        alone = stories15m.tokenizer(text, return_tensors="pt")
        expected = stories15m.model.generate(**alone, **settings)[0]
        assert row[-12:].tolist() == expected[-12:].tolist()


def test_one_text_gives_flat_lists_unless_tensors_are_asked_for(stories):
    assert stories("Hello").input_ids == [1, 15043]
    assert stories("Hello", add_special_tokens=False)["input_ids"] == [15043]
    assert stories("Hello", return_tensors="pt").input_ids.shape == (1, 2)
    assert stories(["Hello", "Once upon"]).input_ids == [[1, 15043], [1, 9038, 2501]]


def test_what_cannot_be_a_tensor_says_how_it_could(stories):
    with pytest.raises(ValueError, match="padding=True"):
        stories(["Once upon a time", "Hello"], return_tensors="pt")
    with pytest.raises(ValueError, match="'np'"):
        stories("Hello", return_tensors="np")
    with pytest.raises(ValueError, match="'max_length'"):
        stories("Hello", padding="max_length")


def test_a_token_out_of_the_vocabulary_is_refused(stories):
    for token in (32_000, -1):
        with pytest.raises(ValueError, match=rf"token {token} is not among 0 \.\.\. 31999"):
            stories.decode([1, token])


# --- what is no tokenizer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], "cut off in token 31999"),
        (lambda raw: raw[: 4 + 8 + 5 + 3], "cut off after 1 tokens"),
        (lambda raw: raw[:2], "longest token would have 0 bytes"),
        (lambda raw: struct.pack("<i", 10**9) + raw[4:], "longest token would have 1000000000"),
        (
            lambda raw: struct.pack("<i", 4) + raw[4:],
            "token 0 would have 5 bytes, the longest has 4",
        ),
        (lambda raw: raw[:8] + struct.pack("<i", -5) + raw[12:], "token 0 would have -5 bytes"),
        (lambda raw: raw[:4] + raw[4 + 13 :], "tokens 3 to 258 must be the bytes"),
        (lambda raw: raw[:200], "is no tokenizer.bin|cut off"),
    ],
)
def test_a_malformed_tokenizer_bin_says_where(stories_folder, tmp_path, change, message):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(change((stories_folder / "tokenizer.bin").read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_tokenizer(path)


def test_what_is_no_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "a.model").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"a\.model is no SentencePiece model"):
        read_tokenizer(tmp_path / "a.model")
    with pytest.raises(FileNotFoundError):
        read_tokenizer(tmp_path / "b.model")
