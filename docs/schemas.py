"""The JSON Schema of saved audits, made from the types that Keyhole writes and reads."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from keyhole.core import FORMAT, Audit
from keyhole.core.exposure import RETURNS
from keyhole.report import json_form

AUDIT = "../src/keyhole/report/schemas/audit-2.schema.json"  # from docs/
DESCRIPTION = """What `keyhole audit` writes and `keyhole report`, `keyhole policy` and
`--baseline` read. A field that is added does not change the format's number; one that is
removed or means something else does."""


class _Untitled(GenerateJsonSchema):
    """Gives fields no title: it would be their name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def audit_schema() -> str:
    """Return what `Audit.load` accepts, and what is under `assessment` in a new file."""
    # Closed objects, as in `keyhole.core.result.typed`; docstrings are the descriptions.
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    kinds = TypeAdapter(tuple[Audit, json_form.AssessmentForm], config=config)
    parts = kinds.json_schema(schema_generator=_Untitled)["$defs"]
    audit = parts.pop("Audit")
    parts["AssessmentForm"]["properties"]["returns"]["items"] = {"enum": list(RETURNS)}
    audit["properties"]["returns"]["items"] = {"enum": list(RETURNS)}
    audit["properties"]["created"]["format"] = "date-time"
    schema = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "$id": json_form.SCHEMA,
        "title": "A saved audit of Keyhole, second form",
        "description": " ".join(DESCRIPTION.split()),
        "type": "object",
        "properties": {
            "$schema": {"const": json_form.SCHEMA},
            "format": {"const": FORMAT},
            "kind": {"const": Audit.kind},
            **audit["properties"],
            "assessment": {"$ref": "#/$defs/AssessmentForm"},
        },
        "required": ["format", "kind", *audit["required"]],
        "additionalProperties": False,
        "$defs": parts,
    }
    return f"{json.dumps(schema, indent=2)}\n"
