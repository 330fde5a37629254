import pytest

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models.anatomy import fitting, positions


@pytest.mark.parametrize(
    ("family", "most"), [("bert", 80), ("roberta", 79), ("gpt2", 80)]
)
def test_a_text_is_cut_off_where_positions_end(family, most):
    model = tiny.model(family)
    words = tiny.tokenizer(family == "gpt2")
    assert positions(model) == most
    assert fitting(model, words, 10**12) == most
    assert fitting(model, words, None) == most
    assert fitting(model, words, 7) == 7


def test_a_length_without_place_for_text_is_refused():
    with pytest.raises(
        InputError, match="more than the 2 tokens that frame it: 2 are allowed"
    ):
        fitting(tiny.model("bert"), tiny.tokenizer(), 2)
