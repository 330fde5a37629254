"""Files that other programs wrote, as targets of an audit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import keyhole
import tiny_models as tiny
from exposures import names
from keyhole.core import Status
from keyhole.core.errors import InputError

TEXT = "w1 w20 w3 w4 w99"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's folder, its cache by torch.save, and its states with the ids."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.save("llama", folder / "model")
    box = keyhole.models.load_model(folder / "model")
    batch = box.tokenizer([TEXT], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        given = box.model(**batch, use_cache=True, output_hidden_states=True)
    torch.save(given.past_key_values, folder / "cache.pt")
    states = torch.stack(given.hidden_states[1:3], 2)[0]
    files = {"hidden_states": states, "token_ids": batch["input_ids"][0]}
    save_file(files, folder / "states.safetensors")
    return folder


@pytest.mark.parametrize(
    ("file", "exposures"),
    [
        ("cache.pt", ["keys and values of layer 0"]),
        ("states.safetensors", ["token ids", "hidden states of layer 1"]),
    ],
)
def test_what_another_program_saved(saved, file, exposures):
    audit = keyhole.audit(str(saved / file), model=str(saved / "model"))
    assert [name.partition(" in ")[0] for name in names(audit.findings)] == exposures
    for finding in audit.findings:
        assert finding.status is Status.RECOVERED
        (reading,) = finding.texts[0].readings
        assert "".join(piece.text for piece in reading.pieces).split() == TEXT.split()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layers", [1]),
        ("layers", "all"),
        ("data", "texts.txt"),
        ("column", "text"),
        ("against_defences", True),
        ("probe_only", True),
        ("budget", 9),
    ],
)
def test_an_option_that_does_nothing_for_a_file_is_refused(
    saved, tmp_path, option, value
):
    shown = option.replace("_", "-")
    given = {option: value}
    with pytest.raises(
        InputError, match=f"^--{shown} does not apply to the leak .*: leave it out"
    ):
        keyhole.audit(str(saved / "cache.pt"), model=str(saved / "model"), **given)
    target = tmp_path / "target.safetensors"
    keyhole.oracle.save(keyhole.oracle.plant(dim=4), target)
    if option != "against_defences":
        with pytest.raises(
            InputError, match=f"^--{shown} does not apply to the endpoint "
        ):
            keyhole.audit(str(target), **given)


def test_the_file_of_another_model_is_no_clean_result(saved, tmp_path):
    tiny.model("llama", 7, head="AutoModel").save_pretrained(tmp_path)
    tiny.tokenizer(True).save_pretrained(tmp_path)
    audit = keyhole.audit(str(saved / "cache.pt"), model=str(tmp_path))
    assert {(each.status, each.known) for each in audit.findings} == {
        (Status.MISMATCH, 0.0)
    }
    assert audit.exit_code == 3


def test_it_takes_the_model(saved, tmp_path):
    for file in ("states.safetensors", "cache.pt"):
        with pytest.raises(InputError, match=f"{file} needs --model"):
            keyhole.audit(str(saved / file))
    target = tmp_path / "target.safetensors"
    keyhole.oracle.save(keyhole.oracle.plant(dim=4), target)
    with pytest.raises(InputError, match="--model does not apply to"):
        keyhole.audit(str(target), model=str(saved / "model"))
