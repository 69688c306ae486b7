import pytest

from labsupport.training.lengths import parse_tokens


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("8K", 8192), ("1m", 2**20), (" 2k ", 2048)]
)
def test_lengths_are_read(text, number):
    assert parse_tokens(text) == number


@pytest.mark.parametrize("text", ["", "K", "1.5K", "-3", "0", "0K", "8Q"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="is no length"):
        parse_tokens(text)
