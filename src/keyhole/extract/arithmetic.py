"""How exact a target's answers are, estimated from the answers alone.

Real targets compute in float32 or less, so an answer has an error of about ε times the
size of the terms that were summed for it, before any cancel. Two things show how large
it is:

- the digits: if all answers are numbers of a shorter format, they have that format's ε; if all
  have few decimals, they were rounded to these;
- equivalent queries: every entry multiplied by 1 ± ε, the tokens before the last in another order,
  every token twice. In exact arithmetic, order and copies change nothing, and a factor
  1 ± ε changes an answer about as much as the target's own rounding does (backward
  stability). So the differences between these answers are an estimate of their error.

A model can be fitted, and judged, to that error and no further.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.float64 import EPSILON, random_stream
from keyhole.extract.bilinear import max_abs
from keyhole.oracle.protocol import Oracle, OracleError, ask, stated

EXACT = 1e-12  # relative errors below this are rounding of float64
ALLOWED = 16.0  # how many times its own error an answer may differ from the model
_FORMATS = (torch.bfloat16, torch.float16, torch.float32)
_READ = 64  # how many answers are compared with float32 as servers print it,
_DIGITS = 8  # if they have this many digits or more: fewer may be deliberate rounding
# a relative change of inputs that float64 resolves and float32 does not
_UNSEEN = 2.0**-40
# a larger relative change of answers after such a change of inputs is noise
_NOISE = 1e-9
_REPEATS = 8  # extra queries that measure how large the noise is
_STREAM = 0x4F574E45
_DECIMALS = 6  # the most that answers are taken to be rounded to
_WHOLE = 1e-6  # distance of a whole number
# if numbers are so far apart in their precision, any of them is nearly whole
_ANY = 0.05
_ZERO = 1e-14  # distance of 0, relative to the largest number
# if reordering tokens changes answers by more, the target uses positions
_DOUBTFUL = 1e-2
_SINGLE = torch.finfo(torch.float32).eps


def precision_of(oracle: Oracle, answers: Tensor) -> float:
    """Return the relative error of an answer: as a wrapper states it, or as the digits show."""
    known: float | None = stated(oracle, "precision")
    return digits(answers) if known is None else known


def digits(answers: Tensor) -> float:
    """Return half the ε of the shortest format that holds all answers; float32 also as decimals."""
    for dtype in _FORMATS:
        if torch.equal(answers, answers.to(dtype).to(torch.float64)):
            return torch.finfo(dtype).eps / 2
    some = answers.flatten()[:_READ]
    printed = [str(value) for value in some.float().numpy()]
    written = [text.strip("-0.").split("e")[0].replace(".", "") for text in printed]
    long = max(map(len, written)) >= _DIGITS
    if long and some.tolist() == [float(text) for text in printed]:
        return _SINGLE / 2
    return EPSILON


def decimals_of(answers: Tensor) -> int | None:
    """Return to how many decimals answers are rounded; None if they are not.

    A number that was stored in float32 is off its decimals by that rounding.
    """
    for decimals in range(_DECIMALS + 1):
        shifted = answers * 10.0**decimals
        allowed = (shifted.abs() * _SINGLE).clamp(min=1e-7)
        if allowed.max() > _ANY:
            single = (answers.float().double() == answers).all()
            return exact_decimals(answers, decimals, decimals if single else _DECIMALS)
        if _are_whole(shifted, allowed):
            return decimals
    return None


def exact_decimals(
    answers: Tensor,
    least: int = 0,
    most: int = _DECIMALS,
) -> int | None:
    """Return the fewest decimals that all numbers in float64 have, from `least` to `most`.

    A number that rounds to 0 must be 0, up to rounding errors of the largest: small
    numbers are not rounded ones.
    """
    for decimals in range(least, most + 1):
        shifted = answers * 10.0**decimals
        if max_abs(shifted) * EPSILON > _ANY:
            return None
        if _are_whole(shifted, _WHOLE):
            return decimals
    return None


def _are_whole(numbers: Tensor, allowed: Tensor | float) -> bool:
    whole = numbers.round()
    zero = (_ZERO * numbers.abs().max()).clamp(max=_WHOLE)
    allowed = torch.where(whole == 0, zero, allowed)
    return bool(((numbers - whole).abs() <= allowed).all())


def smallest(precision: float) -> float:
    """Return the absolute error of answers near zero in the format with this precision."""
    for each in map(torch.finfo, _FORMATS):
        if each.eps / 2 == precision:
            return each.tiny * precision
    return 0.0


def measured_errors(
    oracle: Oracle,
    sequences: Tensor,
    answers: Tensor,
    seen: Tensor,
) -> tuple[float, float]:
    """Return the relative error of an answer, and the range of added noise (0 if there is none).

    The relative error is that of the format of all answers `seen`, or of float32 if the
    target ignores a change of the inputs that only float64 resolves. Noise shows
    because such a change then moves answers far too much.
    """
    precision = digits(seen)
    if precision > EXACT or not answers.any():
        return precision, 0.0
    changed = ask(oracle, sequences * (1 + _UNSEEN * _signs(sequences)))
    if torch.equal(changed, answers):
        return _SINGLE / 2, 0.0
    change = max_abs(changed - answers)
    if answers.ndim > 1 or change <= _NOISE * max_abs(answers):
        return precision, 0.0
    again = sequences[:1].expand(_REPEATS, *sequences.shape[1:])
    repeated = ask(oracle, again * (1 + _UNSEEN * _signs(again)))
    noisy = torch.cat([answers[:1], repeated])
    # all of their range: few samples miss the ends
    return precision, float(noisy.max() - noisy.min())


def own_error(
    oracle: Oracle,
    sequences: Tensor,
    answers: Tensor,
    precision: float,
) -> Tensor:
    """Return the absolute error of each answer (b, …) as (b,), from equivalent queries.

    Reordered and copied tokens count only if the target ignores positions.
    """
    signs = _signs(sequences)
    scaled = [sequences * (1 + 2 * sign * precision * signs) for sign in (1, -1)]
    reordered = torch.cat([scaled[0][:, :-1].flip(1), scaled[0][:, -1:]], 1)
    last = _last(answers)

    def change(equivalent: Tensor) -> Tensor:
        difference = _last(answered(oracle, equivalent)) - last
        return difference.abs().nan_to_num(0.0).amax(1)

    changes = [change(each) for each in scaled]
    copied = change(reordered.repeat_interleave(2, 1))
    if (copied <= _DOUBTFUL * max_abs(last)).all():
        changes.append(copied)
    changes.append(_last(rounding(oracle, answers, precision)).amax(1))
    return torch.stack(changes).amax(0)


def rounding(
    oracle: Oracle,
    answers: Tensor,
    precision: float,
) -> Tensor:
    """Return the error that rounding alone causes in each answer; behind a link, in each score."""
    of_scores = stated(oracle, "rounding")
    return of_scores(answers, precision) if of_scores else precision * answers.abs()


def exact(
    oracle: Oracle,
    answers: Tensor,
    precision: float,
) -> bool:
    """Return whether answers have no error but the rounding of float64."""
    if precision > EXACT:
        return False
    error = rounding(oracle, answers, precision).max()
    return float(error) <= EXACT * max_abs(answers)


def within_own_error(
    oracle: Oracle,
    sequences: Tensor,
    given: Tensor,
    answers: Tensor,
    precision: float,
    allowed: float = ALLOWED,
) -> bool:
    """Return whether arithmetic of this precision explains the model's whole error."""
    if exact(oracle, answers, precision):
        return False
    residual = (given - answers).abs().reshape(len(answers), -1).amax(1)
    own = own_error(oracle, sequences, answers, precision)
    return bool((residual <= allowed * own).all())


def answered(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Return the answers, with NaN where a link is saturated and the oracle gives no score."""
    try:
        return ask(oracle, sequences)
    except OracleError as error:
        if error.answers is None:
            raise
        return error.answers


def _last(answers: Tensor) -> Tensor:
    """Return the last token's answers as (b, m)."""
    return answers[:, -1] if answers.ndim == 3 else answers.reshape(len(answers), -1)


def _signs(sequences: Tensor) -> Tensor:
    stream = random_stream(_STREAM)
    return torch.randint(0, 2, sequences.shape, generator=stream).double() * 2 - 1
