"""How exact a target's answers are, found out from the answers.

Real targets compute in float32 or less. Their answers then are the exact function's but for an
error that depends on the question: about ε times what the inputs, the scores and the values
contribute before they cancel. Two things tell how large it is:

- the digits: answers that all are numbers of a shorter format have its ε;
- the same question in other words: every entry multiplied by 1 ± ε, the tokens before the last in
  another order, and every token twice. To exact arithmetic the order and the copies change nothing,
  and to the target a factor 1 ± ε is what its own rounding does to the inputs anyway: arithmetic
  that is backward stable is off by as much. So the differences are the answers' own error.

A model can be known, and judged, to that error and no further.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.oracle.protocol import Oracle, OracleError, ask, layers

EXACT = 1e-12  # relative errors of answers below this are rounding of float64
ALLOWED = 16.0  # times their own error: how far answers and a model that explains them may differ
_FORMATS = (torch.bfloat16, torch.float16, torch.float32)
_READ = 64  # answers that are compared with float32 as servers print it,
_DIGITS = 8  # in as many digits or more: with fewer they may be rounded on purpose
_UNSEEN = 2.0**-40  # a change of the inputs that float64 shows and float32 does not
_NOISE = 1e-9  # of the answers: what no smooth function makes of that change
_AGAIN = 8  # times that it is asked, to see how large the noise is
_STREAM = 0x4F574E45
_DOUBTFUL = 1e-2  # of the answers: tokens in another order that change more have positions


def precision_of(oracle: Oracle, answers: Tensor) -> float:
    """The relative error of an answer: what a wrapper found out, or what the digits say."""
    for layer in layers(oracle):
        known = getattr(layer, "precision", None)
        if isinstance(known, float):
            return known
    return digits(answers)


def digits(answers: Tensor) -> float:
    """Half the ε of the shortest format that holds all answers, float32 in decimal digits too."""
    for dtype in _FORMATS:
        if torch.equal(answers, answers.to(dtype).to(torch.float64)):
            return torch.finfo(dtype).eps / 2
    some = answers.flatten()[:_READ]
    printed = [str(value) for value in some.float().numpy()]
    most = max(len(text.strip("-0.").split("e")[0].replace(".", "")) for text in printed)
    if most >= _DIGITS and some.tolist() == [float(text) for text in printed]:
        return torch.finfo(torch.float32).eps / 2
    return torch.finfo(torch.float64).eps


def smallest(precision: float) -> float:
    """What answers of the format with this precision are off by where they are nearly zero."""
    formats = {torch.finfo(dtype).eps / 2: torch.finfo(dtype) for dtype in _FORMATS}
    found = formats.get(precision)
    return 0.0 if found is None else found.tiny * found.eps / 2


def measured_errors(
    oracle: Oracle, sequences: Tensor, answers: Tensor, seen: Tensor
) -> tuple[float, float]:
    """The relative error of an answer, and what it may be off by besides, where noise is added.

    The first is what the digits of all answers `seen` say; float32's, where the target does not see
    a change of the questions that float64 shows. Noise makes of such a change far too much.
    """
    precision = digits(seen)
    if precision > EXACT or not bool(answers.any()):
        return precision, 0.0
    changed = ask(oracle, sequences * (1 + _UNSEEN * _signs(sequences)))
    if torch.equal(changed, answers):
        return torch.finfo(torch.float32).eps / 2, 0.0
    if answers.ndim > 1 or float((changed - answers).abs().max()) <= _NOISE * float(
        answers.abs().max()
    ):
        return precision, 0.0
    again = sequences[:1].expand(_AGAIN, *sequences.shape[1:])
    noisy = torch.cat([answers[:1], ask(oracle, again * (1 + _UNSEEN * _signs(again)))])
    return precision, float(noisy.max() - noisy.min())  # twice its half, as it is not all seen


def own_error(oracle: Oracle, sequences: Tensor, answers: Tensor, precision: float) -> Tensor:
    """How far each answer (b, …) may be off, absolutely: (b,).

    Another order and copies are asked for where they say the same to the target; to one with
    positions they do not.
    """
    signs = _signs(sequences)
    turned = [sequences * (1 + 2 * sign * precision * signs) for sign in (1, -1)]
    swapped = torch.cat([turned[0][:, :-1].flip(1), turned[0][:, -1:]], 1).repeat_interleave(2, 1)
    last = _last(answers)
    differences = [(_last(answered(oracle, each)) - last).abs() for each in (*turned, swapped)]
    *turns, swaps = (each.nan_to_num(0.0).amax(1) for each in differences)
    if bool((swaps > _DOUBTFUL * last.abs().max()).any()):
        swaps = turns[0]
    return torch.stack([*turns, swaps, _last(rounding(oracle, answers, precision)).amax(1)]).amax(0)


def rounding(oracle: Oracle, answers: Tensor, precision: float) -> Tensor:
    """What rounding of the answers alone does to each; behind a link that was undone, to scores."""
    for layer in layers(oracle):
        of_scores = getattr(layer, "rounding", None)
        if of_scores is not None:
            return of_scores(answers, precision)
    return precision * answers.abs()


def exact(oracle: Oracle, answers: Tensor, precision: float) -> bool:
    """Are answers off by no more than rounding of float64?"""
    return bool(
        precision <= EXACT
        and rounding(oracle, answers, precision).max() <= EXACT * answers.abs().max()
    )


def within_own_error(
    oracle: Oracle, sequences: Tensor, given: Tensor, answers: Tensor, precision: float,
    allowed: float = ALLOWED,
) -> bool:  # fmt: skip
    """Can arithmetic of this precision have caused all that a model's answers are off by?"""
    if exact(oracle, answers, precision):
        return False
    off = (given - answers).abs().reshape(len(answers), -1).amax(1)
    return bool((off <= allowed * own_error(oracle, sequences, answers, precision)).all())


def answered(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Answers, NaN where the oracle's says nothing: behind a link it may be saturated."""
    try:
        return ask(oracle, sequences)
    except OracleError as error:
        if error.answers is None:
            raise
        return error.answers


def _last(answers: Tensor) -> Tensor:
    """The last token's part of answers, (b, m)."""
    return answers[:, -1] if answers.ndim == 3 else answers.reshape(len(answers), -1)


def _signs(sequences: Tensor) -> Tensor:
    stream = torch.Generator().manual_seed(_STREAM)
    return torch.randint(0, 2, sequences.shape, generator=stream).double() * 2 - 1
