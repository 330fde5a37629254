"""The JSON file: it fits a strict schema and can be loaded, and its verdict is not trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from keyhole.assess import assess
from keyhole.core import Audit, Estimate, Status
from keyhole.core.errors import InputError
from keyhole.report import json_form
from published_schemas import audit_errors, audit_is_valid
from sample_audits import CUT, FINDINGS, SKIPS, finding, judged, read, whole

Path = tuple[str | int, ...]


def dense() -> dict[str, Any]:
    """A file with every kind of object, each a few times."""
    rich = finding(
        "stored embedding",
        "text",
        Status.INEXACT,
        trace=((1, 0.5),),
        cuts=(CUT,),
        texts=(read("pooled", 4, True),),
        estimate=Estimate(4, 10, 1000, 130, 730),
    )
    ignored = finding("keys and values of layer 1", "text", Status.RECOVERED)
    control = replace(FINDINGS[0], control=True)
    made = replace(whole(), findings=(rich, ignored, control), skips=SKIPS[:1])
    return json.loads(json_form.render(judged(made)))


def objects(data: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every object of a document, with its place."""
    if isinstance(data, dict):
        yield path, data
    parts = data.items() if isinstance(data, dict) else enumerate(data)
    for key, part in parts:
        if isinstance(part, dict | list):
            yield from objects(part, (*path, key))


def at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def loads(document: dict[str, Any]) -> bool:
    try:
        Audit.from_dict(json.loads(json.dumps(document)))
    except InputError:
        return False
    return True


def test_files_from_before_the_assessment_are_valid_and_load():
    old = whole().to_dict()
    assert audit_errors(json.loads(json.dumps(old))) == []
    assert Audit.from_dict(json.loads(json.dumps(old))) == whole()


def test_what_is_written_loads_as_the_same_audit(tmp_path):
    path = tmp_path / "audit.json"
    path.write_text(json_form.render(judged(whole())), "utf-8")
    assert Audit.load(path) == whole()


def test_an_assessment_in_a_file_is_not_believed(tmp_path):
    lying = json_form.document(assess(whole()))
    lying["assessment"] = {
        "verdict": "Nothing was given away.",
        "exit_code": 0,
        "findings": [],
    }
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(lying), "utf-8")
    again = assess(Audit.load(path))
    assert again.verdict == assess(whole()).verdict
    assert again.exit_code == 1


def test_no_object_takes_a_key_that_nobody_described():
    document = dense()
    places = [path for path, _ in objects(document)]
    assert len(places) > 25
    for path in places:
        thing = at(document, path)
        thing["surprise"] = "x"
        open_ended = path == ("environment",)  # any versions
        assert audit_is_valid(document) is open_ended, path
        if path[:1] == ("findings",) or path[:1] == ("skips",):
            assert not loads(document), path
        del thing["surprise"]
    assert audit_is_valid(document)


def test_the_schema_requires_what_cannot_be_loaded_without():
    document = dense()
    for path, thing in list(objects(document)):
        for key in list(thing):
            value = thing.pop(key)
            expected = path[:1] != ("assessment",) and loads(document)
            assert audit_is_valid(document) is expected, (path, key)
            thing[key] = value
    assert audit_is_valid(document)


def test_no_value_may_be_of_another_type():
    document = dense()
    for path, thing in list(objects(document)):
        for key, value in list(thing.items()):
            thing[key] = {"x": [1]}
            assert not audit_is_valid(document), (path, key)
            unread = path[:1] == ("assessment",) or key in ("$schema", "assessment")
            assert loads(document) is unread, (path, key)
            thing[key] = value
    assert audit_is_valid(document)
