import pytest

from keyhole.core.files import parse

WRONG = {
    "[NaN]": "NaN, which is no JSON",
    "[-Infinity]": "-Infinity, which is no JSON",
    '{"a": 1, "a": 2}': "a key twice in one object: 'a'",
    "[" * 100_000: "nesting without end",
    "{": "Expecting property name",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items(), ids=WRONG.values())
def test_what_python_lets_pass_or_dies_of(text, words):
    assert parse('{"a": [1, null, "x"]}') == {"a": [1, None, "x"]}
    with pytest.raises(ValueError, match=words):
        parse(text)
