"""The text of a decoder, read with the states of its encoder."""

from dataclasses import replace

import pytest
import torch

import tiny_architectures as zoo
import tiny_models as tiny
from keyhole.audit.options import AuditOptions
from keyhole.audit.target import target_of
from keyhole.audit.texts import TextTarget
from keyhole.core.errors import InputError
from keyhole.models import Loaded, identity
from keyhole.recover import leak_of, load_leak, recover_text, recover_texts, run

WORDS = tiny.tokenizer(causal=True)
TEXT = [7, 21, 9, 40, 33, 7]


def states(seed=0):
    return torch.randn(5, zoo.WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", [*zoo.PAIRS, "whisper"])
@pytest.mark.parametrize("exposure", ["hidden:2", "kv:1"])
def test_read_exactly(family, exposure):
    model = zoo.model(family)
    leak = leak_of(model, WORDS, TEXT, exposure, encoder=states())
    recovery = recover_text(model, WORDS, leak)
    assert recovery.verified
    assert recovery.ids == TEXT


def test_each_behind_its_own_states(tmp_path):
    model = zoo.model("whisper")
    leaks = [
        leak_of(model, WORDS, TEXT, "hidden:1", encoder=states(seed))
        for seed in range(2)
    ]
    assert [each.ids for each in recover_texts(model, WORDS, leaks)] == [TEXT, TEXT]
    file = tmp_path / "leak.safetensors"
    leaks[1].save(file)
    assert torch.equal(load_leak(file).encoder, leaks[1].encoder)
    loaded = Loaded(model, WORDS, identity(model), "whisper")
    assert run(loaded, file)[0].verified
    other = replace(leaks[0], encoder=states(5))
    assert not recover_text(model, WORDS, other).verified
    with pytest.raises(InputError, match=r"encoder states \(m, e\)"):
        replace(leaks[0], encoder=torch.zeros(3))


def test_an_audit_reads_the_decoder_and_says_why_not_the_encoder():
    model = zoo.model("whisper")
    subject = TextTarget(
        Loaded(model, WORDS, identity(model), "whisper"),
        ["w4 w9 w3 w20"],
        precisions=("float32",),
    )
    whole, decoder = target_of(subject).parts
    (skip,) = whole.checks(AuditOptions())[0].run(None).skips
    assert skip.reason == "WhisperEncoder reads input_features, not text"
    rules = {check.exposure.rule: check for check in decoder.checks(AuditOptions())}
    assert decoder.name == "decoder"
    assert not any("PREDICTIONS" in rule for rule in rules)
    (finding,) = (
        rules["KH-TEXT-KEYS-AND-VALUES"].run(lambda *_: lambda *_, **__: None).findings
    )
    assert finding.status == "recovered"
    assert finding.exposure.part == "decoder"
