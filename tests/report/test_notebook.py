"""Results in a notebook: every kind has a view, hostile strings stay text inside the cell."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from html.parser import HTMLParser

import pytest

import keyhole
import tiny_classifiers
import tiny_models as tiny
from browser import chromium
from keyhole import disrupt, extract, invert, oracle, recover
from keyhole.audit import Target
from keyhole.audit.one_exposure import audit_exposure
from keyhole.audit.texts import TextTarget
from keyhole.audit.together import together
from keyhole.core import Fleet, Result, Status
from keyhole.disrupt.certificate.certification import Certification
from keyhole.disrupt.certificate.certify import certify
from keyhole.extract.defences import DefencesTried, Tried
from keyhole.harden.evaluate import Evaluation, Measured, attack
from keyhole.harden.hardening import Hardening, Trained
from keyhole.harden.train import Training
from keyhole.invert.structure.layers import Amplification, LayersInversion
from keyhole.models import Loaded, identity
from keyhole.recover.gradients import batch_of, recover_batch, update_of
from keyhole.report.notebook import VIEWS, html
from keyhole.report.notebook.curves import curve

HOSTILE = (
    "</style></svg><script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>\""
)
TAGS = {
    "div", "style", "p", "span", "b", "br", "table", "thead", "tbody", "tr", "th", "td", "figure",
    "figcaption", "svg", "rect", "line", "text", "polyline", "circle", "title",
}  # fmt: skip
TEXT = "w1 w2 w3 w4"


def _model():
    model = tiny_classifiers.model(labels=2, dropout=0.0)
    return Loaded(model.eval(), tiny.tokenizer(), identity(model), "tiny")


def _audited(loaded: Loaded):
    """Weights, text and predictions."""
    texts = TextTarget(loaded, [TEXT], examples=tuple(tiny_classifiers.examples(4)))
    target = Target("both", {"": oracle.plant(dim=4, seed=1)}, {"": texts})
    asked: dict[str, float | None] = {"scores": None, "hidden:1": None, "flips": 0.2}
    parts = [audit_exposure(target, name, share=share) for name, share in asked.items()]
    return together(parts, "one model")


def _disrupted(loaded: Loaded):
    examples = tiny_classifiers.examples(4)
    made = attack(loaded.model, loaded.tokenizer, examples, disrupt.HackAttend.as_released(0.2))
    return replace(made, examples=tuple(examples))


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """One of each kind, most of them made as people make them."""
    loaded = _model()
    problem, _ = invert.plant(3, 3, seed=1)
    inverted = invert.LevenbergMarquardt(starts=8, seed=0)(problem)
    leak = recover.leak_of(loaded.model, loaded.tokenizer, TEXT, "hidden:1")
    (example, *_), words = tiny_classifiers.examples(4), loaded.tokenizer
    batch = batch_of(loaded.model, words, [example], 32)
    encoded = words(example.text, return_tensors="pt", return_special_tokens_mask=True)
    proof = certify(loaded.model, dict(encoded), 0, name="a text")
    measured = Evaluation(0.9, 10, {"random": Measured(4, 1, 3.0, 0.1)}, {}, {}, 1.0)
    trained = Training(8, 1.5, 0, (0.7, 0.5, 0.2))
    tried = Tried(
        "rounding", "3 decimals", "Tolerant", Status.RECOVERED, "", 1e-9, 1e-4, 0.0, 72, 0.1
    )
    audited = _audited(loaded)
    made = [
        audited, Fleet({"mine": audited, "yours": replace(audited, findings=())}, 1.0),
        extract.SingleHead()(oracle.plant(dim=6, seed=1)), inverted,
        LayersInversion(
            Status.RECOVERED, "why", "m", inverted.X, 1e-15, 0.1,
            layers=(Amplification(2.0, 1.5),), amplification=2.0,
        ),
        invert.bounds(problem, inverted.X), recover.recover_text(loaded.model, words, leak),
        recover_batch(loaded.model, words, update_of(loaded.model, batch)), _disrupted(loaded),
        Certification((proof,), 1, "special", 0.1), measured, trained,
        Hardening(
            "tiny", "sattend", "S-Attend", "train.tsv", 10, {}, "cpu", before=measured,
            runs=(Trained(0, ".", trained, measured),), finished=True,
        ),
        DefencesTried("a head", 6, (tried,)),
    ]  # fmt: skip
    return {result.kind: result for result in made}


def _poisoned(value):
    """The same with every string hostile: fields, names and whatever dictionaries hold."""
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, tuple | list):
        return type(value)(_poisoned(each) for each in value)
    if isinstance(value, dict):
        if any(isinstance(each, str) for each in value.values()):
            return {key: _poisoned(each) for key, each in value.items()}
        return {f"{HOSTILE}{n}": _poisoned(each) for n, each in enumerate(value.values())}
    if isinstance(value, Result) or (is_dataclass(value) and not hasattr(value, "tensors")):
        names = [each.name for each in fields(value) if each.init]
        return replace(value, **{name: _poisoned(getattr(value, name)) for name in names})
    return value


class Reader(HTMLParser):
    """What a browser would make of it: the tags, their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def every_kind() -> set[str]:
    """All results that the package has."""
    for module in pkgutil.walk_packages(keyhole.__path__, "keyhole."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds, left = set(), [Result]
    while left:
        left += (subclasses := left.pop().__subclasses__())
        kinds |= {each.kind for each in subclasses if each.__module__.startswith("keyhole.")}
    return kinds


def test_every_kind_of_result_has_a_view(results):
    assert every_kind() == set(VIEWS) == set(results)


@pytest.mark.parametrize("kind", sorted(VIEWS))
def test_a_result_shows_itself(results, kind):
    page = results[kind]._repr_html_()
    assert page == html(results[kind])
    reader = Reader(page)
    assert reader.tags <= TAGS
    assert ">None<" not in page
    assert "nan" not in reader.text.split()
    assert all("http" not in value for _, value in reader.attributes)


@pytest.mark.parametrize("kind", sorted(VIEWS))
def test_hostile_strings_stay_text(results, kind):
    page = html(_poisoned(results[kind]))
    reader = Reader(page)
    assert reader.tags <= TAGS, reader.tags - TAGS
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert not [name for name, _ in reader.attributes if name in ("href", "src", "xlink:href")]
    assert page.count("<style>") == page.count("</style>") == 1
    if kind not in ("training",):  # which holds one, shown where a run ended early, as here
        assert "<script>window.stolen" in reader.text


def test_what_each_shows(results):
    """The text with its marks, the curve with its points, the sentence with its cuts."""
    text = html(results["text recovery"])
    assert text.count('class="kh-verified"') >= 4
    assert "".join(Reader(text).text.split()).count("w1w2w3w4") == 1
    trace = results["extraction"].trace
    assert html(results["extraction"]).count("<circle") == len(trace)
    assert html(results["training"]).count("<circle") == 3
    shown = html(results["audit"])
    assert shown.count('<div class="kh-card">') == 3  # weights, text, predictions; no inputs
    cut = next(each.cuts[0] for each in results["audit"].findings if each.exposed and each.cuts)
    assert shown.count('title="cut from') == len({key for *_, key in cut.units}) > 1
    assert f"{len(cut.units)} units cut" in " ".join(shown.split())
    assert "stroke-dasharray" in html(results["extraction"])  # the floor
    flips = Reader(html(results["disruption"])).text
    assert f"{results['disruption'].flips} of {len(results['disruption'].attacked)} right" in flips


def test_a_recovery_without_pieces_is_shown_as_one(results):
    old = replace(results["text recovery"], pieces=())
    assert html(old).count('class="kh-verified"') == 1
    assert old.text in Reader(html(old)).text


def test_a_kind_without_a_view_shows_its_summary(results):
    class Odd(Training):
        kind = "odd"

    odd = Odd(1, 1.0, 0, (), reason=HOSTILE)
    assert "<script>window.stolen" in Reader(html(odd)).text
    assert Reader(html(odd)).tags <= TAGS


@pytest.mark.parametrize(
    ("points", "drawn"),
    [((), 0), (((1, float("nan")),), 0), (((1, 0.0), (2, 0.0)), 2), (((3, 1e-9),), 1)],
)
def test_a_curve_takes_any_numbers(points, drawn):
    made = curve(points, "queries", "error", log_x=True)
    assert sum(len(each.points) for each in made) == drawn
    for each in made:
        left, top, right, bottom = each.frame
        assert all(left <= x <= right and top <= y <= bottom for x, y, _ in each.points)
        assert len(each.down) >= 2


@pytest.fixture(scope="module")
def browser():
    with chromium() as launched:
        yield launched


_STYLES = """() => [...document.querySelectorAll(".outside")].map(one => {
  const style = getComputedStyle(one);
  return [style.color, style.fontSize, style.backgroundColor, style.padding, style.textAlign];
})"""
_OUTSIDE = """() => [...document.querySelectorAll(".cell")].filter(cell => {
  const box = cell.getBoundingClientRect();
  const view = cell.querySelector(".keyhole-view").getBoundingClientRect();
  return view.left < box.left - 1 || view.right > box.right + 1;
}).length"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_keeps_it_inside_its_cell(browser, results, tmp_path, scheme):
    ink, paper = ("#111", "#fff") if scheme == "light" else ("#eee", "#111")
    outside = '<p class="outside kh-tag kh-bad">before</p><table class="outside"><tr><td>x</table>'
    cells = [
        f'<div class="cell" style="width: 600px">{html(each)}</div>'
        for result in results.values()
        for each in (result, _poisoned(result))
    ]
    frame = (
        '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<body style="color: {ink}; background: {paper}">{outside}'
    )
    path = tmp_path / "notebook.html"
    page = browser.new_page(viewport={"width": 700, "height": 800}, color_scheme=scheme)
    trouble: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    path.write_text(frame, "utf-8")
    page.goto(path.as_uri())
    before = page.evaluate(_STYLES)
    path.write_text(frame + "".join(cells), "utf-8")
    page.goto(path.as_uri())
    assert page.evaluate(_STYLES) == before  # no style of ours reaches what is around
    assert page.evaluate(_OUTSIDE) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.evaluate("window.stolen") is None
    assert page.locator(".keyhole-view").count() == len(cells)
    shade = page.evaluate('getComputedStyle(document.querySelector(".keyhole-view td")).color')
    assert shade == page.evaluate("getComputedStyle(document.body).color")
    assert trouble == []
    assert set(asked) == {path.as_uri()}
    page.close()
