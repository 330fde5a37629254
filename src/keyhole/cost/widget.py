"""What taking a head costs, with sliders: one piece of HTML for the page and the documents.

No network, no handlers in attributes, no eval: one inline script and one inline style, which a
Content-Security-Policy can allow by hash or by the nonce that is given. The formulas stand in the
script as they stand here; a test in a browser compares what it shows with `keyhole.cost.head`.
"""

from __future__ import annotations

import json
from html import escape

from keyhole.cost.measured import figures

# By exposure: queries, floor and tokens as expressions of JavaScript in d, r (the rank), and e (the
# accuracy). tests/cost/test_widget.py holds them to the methods' own counts.
_BITS = "(-Math.log2(e) + Math.log2(d) + 1)"
FORMULAS: dict[str, tuple[str, str, str]] = {
    "scores": ("d * d + d", "d * d + d", "2 * d * d + d"),
    "scores, low rank": (
        "d + 2 * r * d - r * r", "d + 2 * r * d - r * r", "d + 2 * (2 * r * d - r * r)",
    ),
    "rounded": ("d * d + 2 * d", "d * d + d", "2 * d * d + 2 * d"),
    "signs": (
        f"Math.ceil(d * d * {_BITS} + d * ({_BITS} + 6))",
        "Math.ceil((d * d + d - 1) * -Math.log2(e))",
        f"2 * Math.ceil(d * d * {_BITS} + d * ({_BITS} + 6))",
    ),
    "vectors": ("2 * d + 2", "2 * d", "2 * d * d + 3 * d + 5"),
}  # fmt: skip
# Name, label, smallest, largest and first exponent of two or ten, base.
_SLIDERS = (
    ("width", "width", 2, 13, 6, 2), ("rank", "rank", 0, 13, 3, 2),
    ("digits", "digits read from signs", 1, 12, 6, 10), ("rate", "queries a second", 0, 5, 1, 10),
    ("price", "price of 1,000 queries", -3, 3, 0, 10),
    ("daily", "daily budget of queries", 1, 7, 3, 10),
)  # fmt: skip

_STYLE = """
.keyhole-cost { max-width: 44rem; font-family: system-ui, sans-serif; }
.keyhole-cost label { display: grid; grid-template-columns: 15rem 1fr 7rem; gap: .75rem; }
.keyhole-cost label output { text-align: right; font-variant-numeric: tabular-nums; }
@media (max-width: 34rem) { .keyhole-cost label { grid-template-columns: 1fr 5rem; }
  .keyhole-cost label input { grid-row: 2; } }
.keyhole-cost table { margin-top: 1rem; border-collapse: collapse; width: 100%; }
.keyhole-cost th, .keyhole-cost td { padding: .2rem .5rem; text-align: right; }
.keyhole-cost th:first-child { text-align: left; font-weight: normal; }
"""

_SCRIPT = """
(() => {
  "use strict";
  const formulas = {%(formulas)s
  };
  const most = %(most)s;
  const place = document.currentScript.closest(".keyhole-cost");
  const field = (name) => place.querySelector(`[name="${name}"]`);
  const shown = (name, text) => {
    place.querySelector(`[data-shown="${name}"]`).textContent = text;
  };
  const whole = (number) => Math.round(number).toLocaleString("en-US");
  const short = (number) => Number(number.toPrecision(3)).toLocaleString("en-US",
    { maximumSignificantDigits: 3 });
  const power = (name) => field(name).dataset.base ** Number(field(name).value);
  const update = () => {
    const exposure = field("exposure").value;
    const d = power("width"), r = Math.min(power("rank"), d), e = 1 / power("digits");
    const rate = power("rate"), price = power("price") / 1000, daily = power("daily");
    const [queries, floor, tokens] = formulas[exposure].map((count) => count(d, r, e));
    shown("width", whole(d)); shown("rank", whole(r));
    shown("digits", field("digits").value); shown("rate", whole(rate));
    shown("price", short(1000 * price)); shown("daily", whole(daily));
    field("rank").disabled = exposure !== "scores, low rank";
    field("digits").disabled = exposure !== "signs";
    const about = exposure === "signs"
      ? ` (${whole(floor)} to ${whole(Math.ceil(most * queries))})` : "";
    shown("queries", whole(queries) + about);
    shown("floor", whole(floor));
    shown("tokens", whole(tokens));
    shown("hours", short(queries / rate / 3600));
    shown("money", short(queries * price));
    shown("days", short(queries / daily));
    shown("least-days", short(floor / daily));
  };
  place.addEventListener("input", update);
  update();
})();
"""
_RESULTS = (
    ("queries", "queries"), ("floor", "no attack takes fewer than"),
    ("tokens", "tokens sent, at most"), ("hours", "hours"), ("money", "money"),
    ("days", "days that the daily budget holds"), ("least-days", "… against any attack"),
)  # fmt: skip


def style() -> str:
    """Its style alone, for a policy that allows it by hash."""
    return _STYLE


def script() -> str:
    """Its script alone, for the same."""
    (signs,) = figures("signs")
    functions = ",".join(
        f"\n    {json.dumps(name)}: [{', '.join(f'(d, r, e) => {part}' for part in parts)}]"
        for name, parts in FORMULAS.items()
    )
    return _SCRIPT % {"formulas": functions, "most": json.dumps(signs["most"])}


def render(nonce: str | None = None) -> str:
    """The piece of HTML; `nonce` is put on its style and its script."""
    allowed = "" if nonce is None else f' nonce="{escape(nonce)}"'
    choices = "".join(f"<option>{escape(name)}</option>" for name in FORMULAS)
    sliders = "".join(_slider(*slider) for slider in _SLIDERS)
    rows = "".join(
        f'<tr><th scope="row">{label}</th><td data-shown="{name}"></td></tr>'
        for name, label in _RESULTS
    )
    return (
        f'<section class="keyhole-cost" aria-label="What taking one head costs">'
        f"<style{allowed}>{style()}</style>"
        f'<label>the endpoint returns <select name="exposure">{choices}</select></label>'
        f'{sliders}<table aria-live="polite">{rows}</table>'
        f"<script{allowed}>{script()}</script></section>"
    )


def _slider(name: str, label: str, least: int, most: int, first: int, base: int) -> str:
    return (
        f'<label>{label} <input type="range" name="{name}" min="{least}" max="{most}" '
        f'step="1" value="{first}" data-base="{base}">'
        f'<output data-shown="{name}"></output></label>'
    )
