"""Loaded models are ready to be attacked; untrusted or broken ones are refused in one line."""

from __future__ import annotations

import importlib
from copy import deepcopy
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers

import tiny_architectures
import tiny_classifiers
import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models import Exposure, anatomy, capture, identity, load_model
from keyhole.models.loading import head_of, load_config, named_task, task_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.model("bert").save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def test_a_folder(folder):
    loaded = load_model(folder)
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert loaded.tokenizer("w1 w2")["input_ids"] == [2, 6, 7, 3]
    whole = tiny.model("bert")
    ours = tiny.ids()
    loaded.model.set_attn_implementation("eager")  # as the other: equal to the last bit
    got = capture(loaded.model, Exposure("hidden", 3), ids=ours)["values"]
    assert torch.equal(got, whole(input_ids=ours).last_hidden_state)
    assert loaded.identity == identity(whole)


def test_identity_depends_on_weights_and_configuration_but_not_on_the_head():
    base = tiny.model("bert")
    assert identity(base) == identity(tiny.model("bert"))
    assert identity(base) != identity(tiny.model("bert", seed=1))
    assert identity(base) != identity(tiny.model("bert", hidden_act="relu"))
    with torch.random.fork_rng():
        topped = transformers.BertForSequenceClassification(base.config)
    topped.bert.load_state_dict(base.state_dict())
    assert identity(topped) == identity(base)
    weight = base.encoder.layer[1].output.dense.weight
    weight.data[0, 0] += 1e-3
    assert identity(base) != identity(tiny.model("bert"))


def test_a_task_adds_a_head(folder):
    made = load_model(folder, task="classification", new_head=3).model
    assert made.config.num_labels == 3
    with pytest.raises(InputError, match="has no trained head for classification"):
        load_model(folder, task="classification")  # it would be random
    with pytest.raises(InputError, match="task must be one of base"):
        load_model(folder, task="poetry")


def test_the_task_of_a_checkpoint(folder, tmp_path):
    assert task_of(folder) == "base"
    tiny_classifiers.model().save_pretrained(tmp_path)
    assert task_of(tmp_path) == "classification"
    assert (
        load_model(
            tmp_path, task="classification", tokenizer=False
        ).model.config.num_labels
        == 3
    )


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "classification"),
        ("ViTForImageClassification", "classification"),
        ("BertForTokenClassification", "base"),
        ("BertForMultipleChoice", "choice"),
        ("GPT2LMHeadModel", "causal"),
        ("LlamaForCausalLM", "causal"),
        ("BertModel", "base"),
        ("T5ForConditionalGeneration", "seq2seq"),
    ],
)
def test_an_architecture_and_its_model_have_the_same_task(architecture, task):
    config = SimpleNamespace(is_encoder_decoder=task == "seq2seq")
    model = type(architecture, (), {"config": config})()
    assert named_task(architecture) == head_of(model) == task


@pytest.mark.parametrize("pair", [True, False])
def test_an_encoder_saved_without_its_decoder_is_read_alone(tmp_path, pair):
    whole = tiny_architectures.model("t5")
    alone = transformers.T5EncoderModel(deepcopy(whole.config))
    alone.load_state_dict(whole.state_dict(), strict=False)
    alone.eval().config.is_encoder_decoder = pair  # checkpoints state either
    alone.save_pretrained(tmp_path)
    model = load_model(tmp_path, tokenizer=False).model
    assert anatomy(model).layers == tiny_architectures.LAYERS
    ids = torch.tensor([[5, 9, 7, 30]])
    mine, own = (
        capture(each, Exposure("hidden", 1), ids=ids)["values"]
        for each in (model, whole)
    )
    assert torch.allclose(mine, own, atol=1e-5)
    assert not hasattr(model, "decoder")  # its weights would be random


def test_an_identity_with_the_head_differs_between_heads():
    first, second = (tiny_classifiers.model(seed=1) for _ in range(2))
    assert identity(first, head=True) == identity(second, head=True)
    with torch.no_grad():
        second.classifier.bias.add_(1)
    assert identity(first) == identity(second)
    assert identity(first, head=True) != identity(second, head=True)


def test_an_unknown_device_is_refused(folder):
    with pytest.raises(InputError, match="is not a device of this machine"):
        load_model(folder, device="cuda:77")


def test_pickled_weights_are_refused_unless_asked_for(folder, tmp_path):
    config = folder / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    torch.save(tiny.model("bert").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="only pickled ones: --allow-pickle"):
        load_model(tmp_path)
    with pytest.raises(InputError, match=r"has no tokenizer|cannot load the tokenizer"):
        load_model(tmp_path, allow_pickle=True)
    loaded = load_model(tmp_path, allow_pickle=True, tokenizer=False)
    assert loaded.identity == identity(tiny.model("bert"))


def test_remote_code_is_never_run(folder, tmp_path):
    """A checkpoint that names code of its own is an error, and the code stays unread."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "config.json").read_text()
    named = text.replace(
        '"model_type": "bert"',
        '"model_type": "own",\n  "auto_map": '
        '{"AutoConfig": "own.Own", "AutoModel": "own.Own"}',
    )
    (tmp_path / "config.json").write_text(named)
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(InputError, match="cannot load the configuration of"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such folder"),
        ("./nothing", "no such folder"),
        ("folder/model.gguf", "as a GGUF file"),
        ("", "name a model: a folder, a .gguf file, a hub name or demo"),
    ],
)
def test_a_name_of_no_model_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        load_model(name)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch, capfd):
    asked = []

    class Unplugged:
        def head(self, url, timeout):
            asked.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_session", Unplugged)
    with pytest.raises(InputError, match=r"cannot load .* nobody/nothing") as caught:
        load_config("nobody/nothing")
    assert "connect to" in str(caught.value)
    assert asked == [huggingface_hub.constants.ENDPOINT]
    assert capfd.readouterr() == ("", "")


def test_loading_is_quiet_and_restores_the_level_of_logging(folder, monkeypatch, capfd):
    ours = huggingface_hub.utils.logging
    make = transformers.AutoConfig.from_pretrained

    def warns(*arguments, **options):
        ours.get_logger("huggingface_hub.somewhere").warning("Retrying in 1s")
        return make(*arguments, **options)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", warns)
    level = ours.get_verbosity()
    load_config(folder)
    assert capfd.readouterr().err == ""
    assert ours.get_verbosity() == level


def test_folders_without_a_model_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InputError, match=r"has no weights as .safetensors$"):
        load_model(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(InputError, match="cannot load the model") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="is a file: give"):
        load_model(tmp_path / "config.json")


def test_without_the_library(folder, monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[models\]'"):
        load_model(folder)
