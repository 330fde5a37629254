"""What a model's head is for: one vocabulary for loading, attacking, training and the command line.

| task | answers with |
|---|---|
| base | no head: hidden states |
| classification | one class of a text (or an image) |
| choice | one of several texts |
| causal | the next token |
| seq2seq | the next token of a decoder, given a text |
"""

from __future__ import annotations

from typing import Any, Literal

Task = Literal["base", "classification", "choice", "causal", "seq2seq"]
GENERATES = ("causal", "seq2seq")  # what such a model writes by itself is what it holds to be right
AUTO_CLASSES: dict[str, str] = {  # the library's classes that load a model with such a head
    "base": "AutoModel",
    "causal": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "choice": "AutoModelForMultipleChoice",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_ENDINGS: dict[str, Task] = {  # how the library names classes with a head
    "ForTokenClassification": "base",  # a class for each token is no answer to a text
    "Classification": "classification",
    "Classifier": "classification",
    "ForMultipleChoice": "choice",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "seq2seq",
}


def named_task(architecture: str) -> Task:
    """The task that an architecture's name ends in; "base" where it is none of those above."""
    for ending, task in _ENDINGS.items():
        if architecture.endswith(ending):
            return task
    return "base"


def head_of(model: Any) -> Task:
    """The task that a model's head is for; "base" where it has none of those above."""
    task = named_task(type(model).__name__)
    if task == "seq2seq" and not getattr(model.config, "is_encoder_decoder", False):
        return "base"  # it writes about images, or sounds
    return task
