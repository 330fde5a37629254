"""The drawings of the documents, which docs/generate.py writes as SVG files into docs/drawings/.

Colours follow the reader's system, light or dark. The drawings of threats show the same
model, the part that leaks, and what the attacker gets; each family of methods has a
drawing too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import quoted

STYLE = """
svg { color-scheme: light dark; font: 13px system-ui, sans-serif; --ink: #1f2328; --soft: #59636e;
  --line: #8b949e; --fill: #f3f4f6; --leak: #b3400a; --leaks: #ffe9dc; --gain: #0b6b5d;
  --gains: #ddf3ee; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e8eb; --soft: #a4adb7; --line: #6e7781;
  --fill: #262b33; --leak: #ff9d66; --leaks: #44281a; --gain: #6fd6c4; --gains: #16382f; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .leak { fill: var(--leak); }
.gain { fill: var(--gain); } .small { font-size: 11px; } .middle { text-anchor: middle; }
.plain { fill: var(--fill); stroke: var(--line); }
.leaking { fill: var(--leaks); stroke: var(--leak); }
.gained { fill: var(--gains); stroke: var(--gain); }
.way { fill: none; stroke: var(--line); stroke-width: 1.5; marker-end: url(#end); }
.tap { fill: none; stroke: var(--leak); stroke-width: 2; marker-end: url(#tapped); }
.curve { fill: none; stroke: var(--gain); stroke-width: 2.5; }
.axis { fill: none; stroke: var(--line); } .dash { stroke-dasharray: 4 3; }
"""
ARROWS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="var(--{colour})"/></marker>'
    for name, colour in (("end", "line"), ("tapped", "leak"))
)


class Sheet:
    """A drawing that grows shape by shape."""

    def __init__(self, title: str, width: int = 720, height: int = 230) -> None:
        self.title = title
        self.width = width
        self.height = height
        self.shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        lines: Sequence[str] = (),
        kind: str = "plain",
    ) -> None:
        self.shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5"/>'
        )
        for number, line in enumerate(lines):
            middle = y + h / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2)
            self.text(x + w / 2, middle, line, "middle")

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "start"
    ) -> None:
        place = "" if anchor == "start" else f'text-anchor="{anchor}" '
        self.shapes.append(
            f'<text {place}class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str = "way") -> None:
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline class="{kind}" points="{steps}"/>')

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style><defs>{ARROWS}</defs>"
            f"{''.join(self.shapes)}</svg>\n"
        )


# The model of all threats: its parts from left to right.
PARTS = {
    "text": ("the text",),
    "embeddings": ("token", "embeddings"),
    "attention": ("attention",),
    "states": ("hidden", "states"),
    "pooled": ("one vector",),
    "answer": ("the answer",),
}
WIDTH = 96
GAP = 24
TOP = 44


def model(
    title: str, leaking: Sequence[str], renamed: dict[str, tuple[str, ...]]
) -> Sheet:
    """Draw the model, and mark the parts that leak."""
    sheet = Sheet(title)
    sheet.text(12, 24, "the model, on somebody's machine", "soft small")
    for number, (part, lines) in enumerate(PARTS.items()):
        kind = "leaking" if part in leaking else "plain"
        sheet.box(left(part), TOP, WIDTH, 48, renamed.get(part, lines), kind)
        if number:
            sheet.path([(left(part) - GAP, TOP + 24), (left(part) - 2, TOP + 24)])
    start = left("states") + 40
    end = left("attention") + 40
    under = TOP + 62
    sheet.path([(start, TOP + 48), (start, under), (end, under), (end, TOP + 50)])
    sheet.text(left("attention") + 86, TOP + 76, "every layer", "soft small")
    return sheet


def left(part: str) -> float:
    return 12 + list(PARTS).index(part) * (WIDTH + GAP - 1)


def threat(
    title: str,
    leaking: Sequence[str],
    leak: str,
    has: Sequence[str],
    gets: Sequence[str],
    renamed: dict[str, tuple[str, ...]] | None = None,
) -> Sheet:
    """Draw the model, the leak, the attacker below it, and what the attacker gets."""
    sheet = model(title, leaking, renamed or {})
    sheet.text(12, 160, "the attacker", "soft small")
    sheet.box(240, 166, 190, 52, has)
    sheet.box(508, 166, 196, 52, gets, "gained")
    sheet.path([(430, 192), (506, 192)])
    for part in leaking:
        x = left(part) + WIDTH / 2 + (24 if part in ("attention", "states") else 0)
        sheet.path([(x, TOP + 49), (x, 140), (335, 140), (335, 164)], "tap")
    sheet.text(330, 134, leak, "leak small" + (" middle" if len(leaking) > 1 else ""))
    return sheet


def hidden_states() -> Sheet:
    return threat(
        "Hidden states leave the model and the text comes back",
        ["states"],
        "rows of numbers",
        ["the weights,", "an open checkpoint"],
        ["the text, token by token,", "checked by a pass"],
    )


def embeddings() -> Sheet:
    return threat(
        "A vector store keeps one vector per text, and the text comes back",
        ["pooled"],
        "a vector for each text, in a store",
        ["the encoder's weights", "and texts to count"],
        ["short sentences, exactly;", "longer ones in part"],
        {"answer": ("a search",)},
    )


def logits() -> Sheet:
    return threat(
        "Log-probabilities give the last state away, and with it prompt and last layer",
        ["answer"],
        "log-probabilities of all tokens",
        ["queries; for prompts", "the weights"],
        ["the last layer;", "short prompts"],
        {"pooled": ("the last", "state"), "answer": ("next token",)},
    )


def maps_and_caches() -> Sheet:
    return threat(
        "Attention maps, keys and values leave the model and the text comes back",
        ["attention"],
        "maps; keys and values",
        ["the weights,", "an open checkpoint"],
        ["the text; at the first", "layer in closed form"],
    )


def scores() -> Sheet:
    sheet = model(
        "Scores of chosen queries are equations for the weights",
        ["answer"],
        {
            "text": ("the query",),
            "pooled": ("the head",),
            "answer": ("a score",),
        },
    )
    sheet.text(12, 160, "the attacker", "soft small")
    sheet.box(100, 166, 190, 52, ["chosen queries", "[x+δ ; x]"])
    sheet.box(
        508, 166, 196, 52, ["the weights W and v,", "to the last digit"], "gained"
    )
    sheet.path(
        [(150, 165), (150, 126), (left("text") + 48, 126), (left("text") + 48, 95)]
    )
    x = left("answer") + WIDTH / 2
    sheet.path([(x, TOP + 49), (x, 164)], "tap")
    sheet.path([(290, 192), (506, 192)])
    sheet.text(398, 186, "d² + d of them", "soft small middle")
    sheet.text(x - 8, 124, "one equation each", "leak small", "end")
    return sheet


def gradients() -> Sheet:
    return threat(
        "A client's gradient goes to a server, and its batch comes back",
        ["answer"],
        "the gradient of a batch, or new weights",
        ["the weights before", "the step"],
        ["the batch: texts", "and their classes"],
        {
            "text": ("a batch", "of texts"),
            "pooled": ("the head",),
            "answer": ("the loss and", "its gradient"),
        },
    )


def masks() -> Sheet:
    sheet = model(
        "A mask that cuts 1% of the attention changes the answer", ["attention"], {}
    )
    sheet.text(12, 160, "the attacker", "soft small")
    sheet.box(160, 166, 190, 52, ["a mask: 1% of the", "attention is cut"])
    x = left("attention") + WIDTH / 2 + 24
    sheet.path([(x, 165), (x, TOP + 51)], "tap")
    sheet.box(508, 166, 196, 52, ["another answer,", "the text untouched"], "gained")
    sheet.path([(left("answer") + 48, TOP + 49), (left("answer") + 48, 164)])
    sheet.text(left("answer") + 40, 134, "flips", "gain small", "end")
    return sheet


def extract() -> Sheet:
    """Show why an answer gives a bilinear form: the softmax of two tokens is logistic."""
    sheet = Sheet(
        "Two tokens make the softmax a logistic function of one number", 720, 250
    )
    sheet.text(24, 30, "query [x+δ ; x]: the answer vᵀx + α·vᵀδ gives α")
    sheet.path([(70, 210), (660, 210)], "axis")
    sheet.path([(365, 50), (365, 214)], "axis")
    curve = [
        (365 + 46 * z, 210 - 150 / (1 + math.exp(-z)))
        for z in (k / 10 for k in range(-60, 61))
    ]
    sheet.path(curve, "curve")
    x = 365 + 46 * 1.4
    y = 210 - 150 / (1 + math.exp(-1.4))
    sheet.path([(90, y), (x, y)], "tap dash")
    sheet.path([(x, y), (x, 208)], "tap dash")
    sheet.text(78, y - 6, "α, from the answer", "leak")
    sheet.text(x - 20, 230, "δᵀWx, one equation for W", "leak")
    sheet.text(580, 52, "α = σ(δᵀWx)", "gain")
    return sheet


def invert() -> Sheet:
    """Show one output and the inputs that give it."""
    sheet = Sheet(
        "Attention forward, and several inputs with the same output", 720, 220
    )
    for number, y in enumerate((30, 86, 142)):
        sheet.box(
            24,
            y,
            120,
            40,
            [f"an input X{'₁₂₃'[number]}"],
            "gained" if not number else "plain",
        )
        sheet.path([(144, y + 20), (268, 106 + 8 * (number - 1))])
    sheet.box(270, 76, 170, 60, ["softmax(X W Xᵀ) X V", "weights are known"])
    sheet.path([(440, 106), (528, 106)])
    sheet.box(530, 82, 160, 48, ["the output B leaked"], "leaking")
    sheet.path([(600, 132), (600, 204), (84, 204), (84, 184)], "tap dash")
    sheet.text(
        220, 198, "search for all X with this output; maps leave one", "leak small"
    )
    return sheet


def recover() -> Sheet:
    """Show the loop of every attack on text: propose, run, compare."""
    sheet = Sheet(
        "Propose a text, run the model on it, compare with the leak", 720, 210
    )
    sheet.box(24, 40, 150, 52, ["the leak:", "rows of one layer"], "leaking")
    sheet.box(262, 40, 170, 52, ["a map from the weights:", "first tokens"])
    sheet.box(522, 40, 174, 52, ["the model's own rows", "of these tokens"])
    sheet.box(262, 136, 170, 52, ["tokens that fit worst", "are changed"])
    sheet.box(522, 136, 174, 52, ["the text, verified:", "no other fits"], "gained")
    for points in (
        [(174, 66), (260, 66)],
        [(432, 66), (520, 66)],
        [(609, 94), (609, 134)],
        [(520, 84), (470, 84), (470, 160), (434, 160)],
        [(347, 134), (347, 94)],
    ):
        sheet.path(points)
    sheet.text(478, 116, "they differ", "soft small")
    sheet.text(616, 118, "they agree", "gain small")
    return sheet


def disrupt() -> Sheet:
    """Show an attention map with a few units cut, and the answer before and after."""
    sheet = Sheet(
        "One unit in a hundred of each head is cut, and the answer flips", 720, 220
    )
    cut = {(2, 7), (9, 3)}
    for row in range(14):
        for column in range(14):
            kind = "leaking" if (row, column) in cut else "plain"
            sheet.shapes.append(
                f'<rect class="{kind}" x="{40 + 12 * column}" y="{34 + 12 * row}" '
                'width="10" height="10" rx="2"/>'
            )
    sheet.text(40, 24, "one head's attention: query × key", "soft small")
    sheet.text(236, 70, "2 of 196 units are cut", "leak")
    sheet.text(236, 90, "before the softmax", "soft")
    sheet.path([(236, 120), (420, 120)])
    sheet.box(440, 50, 240, 26, ["before: positive"])
    sheet.box(440, 108, 240, 26, ["after: negative"], "gained")
    sheet.text(236, 150, "which units: those whose removal", "soft")
    sheet.text(236, 168, "moves the answer most, ranked again", "soft")
    return sheet


def harden() -> Sheet:
    """Show training with attention cut as the attack would cut it."""
    sheet = Sheet("Training sees the text whole and with attention cut", 720, 200)
    sheet.box(24, 74, 120, 48, ["texts and", "labels"])
    sheet.box(220, 30, 200, 48, ["a pass over all", "of the attention"])
    sheet.box(
        220,
        118,
        200,
        48,
        ["a pass with units cut:", "at random, or by the attack"],
        "leaking",
    )
    sheet.box(
        500, 74, 180, 48, ["the sum of both losses", "moves the weights"], "gained"
    )
    for x, (start, end) in (
        (144, (90, 60)),
        (144, (106, 136)),
        (420, (60, 90)),
        (420, (136, 106)),
    ):
        sheet.path([(x, start), (x + 74 if x == 144 else x + 78, end)])
    sheet.path([(590, 124), (590, 190), (84, 190), (84, 124)], "way dash")
    sheet.text(270, 184, "again, for every batch", "soft small")
    return sheet


# What protects stored vectors: each letter is a defence, its points the strengths.
LETTERS = {
    "none": "0",
    "Gaussian noise": "G",
    "metric privacy": "M",
    "rounding": "B",
    "product quantisation": "Q",
    "random projection": "P",
    "truncation": "T",
    "secret rotation": "R",
}
RECORDS = {
    "MiniLM": ("protection-minilm", "protection-maps"),
    "MPNet": ("protection-mpnet",),
    "Nomic": ("protection-nomic",),
}


def protection() -> Sheet:
    """Draw texts read against recall from the records, with a panel for each encoder."""
    sheet = Sheet(
        "Texts read behind each defence, against what retrieval keeps", height=290
    )
    drawn = set[str]()
    for number, (name, records) in enumerate(RECORDS.items()):
        x = 46 + 230 * number
        y = 30
        size = 190
        sheet.path([(x, y), (x, y + size), (x + size, y + size)], "axis")
        sheet.text(x + size / 2, y - 10, name, "middle")
        for share in (0, 0.5, 1):
            sheet.text(
                x - 18, y + 4 + size * (1 - share), f"{share:.0%}", "soft small middle"
            )
            sheet.text(
                x + size * share, y + size + 14, f"{share:g}", "soft small middle"
            )
        points: dict[str, list[tuple[float, float]]] = {}
        for run in (run for each in records for run in quoted.Record.load(each).runs):
            if run.get("defence") in LETTERS:
                place = (
                    x + size * run["recall"],
                    y + size * (1 - run["exact"] / run["texts"]),
                )
                points.setdefault(LETTERS[run["defence"]], []).append(place)
        drawn |= set(points)
        for letter, places in points.items():
            if letter != "R":  # every rotation keeps all distances
                sheet.path(sorted(places), "axis")
            for left, top in places:
                sheet.text(left, top + 4, letter, "leak small middle")
    sheet.text(
        46, 252, "up: texts read exactly; across: recall@10 that is left", "soft small"
    )
    words = [f"{letter} {name}" for name, letter in LETTERS.items() if letter in drawn]
    for row in range(2):
        sheet.text(
            46, 268 + 14 * row, " · ".join(words[4 * row : 4 * row + 4]), "soft small"
        )
    return sheet


DRAWINGS: dict[str, Callable[[], Sheet]] = {
    "hidden-states": hidden_states,
    "embeddings": embeddings,
    "logits": logits,
    "scores": scores,
    "maps-and-caches": maps_and_caches,
    "gradients": gradients,
    "masks": masks,
    "extract": extract,
    "invert": invert,
    "recover": recover,
    "disrupt": disrupt,
    "harden": harden,
    "protection": protection,
}
