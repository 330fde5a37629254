"""Defences by name, as benchmarks/harden.py takes them: see its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyhole import harden
from keyhole.harden import DEFENCES, Defence

PRESETS = (
    "attack-masks:0.35:0.01:random:2:labels",
    "attack-masks:0.5:0.01:random:2:labels",
    "attack-masks:0.35:0.01:random:1:consistency",
    "attack-masks:2:0.05:random:1:consistency",
    "freelb+attack-masks:0.5:0.01",
    "freelb+attack-masks:1:0.01",
)
METHODS = ("plain", "sattend:0.1", "sattend:0.2", "sattend:0.5", "sattend-token:0.2", "freelb",
           "smart", "r3f", "asa", "sweep")  # fmt: skip


def defence(name: str) -> Defence:
    if ">" in name:
        first, *later = name.split(">")
        stages = [(0.0, defence(first))]
        stages += [
            (float(at), defence(part)) for at, part in zip(later[::2], later[1::2], strict=True)
        ]
        return harden.Stages(tuple(stages))
    if "+" in name:
        return harden.Combined(tuple(defence(part) for part in name.split("+")))
    kind, *given = name.split(":")
    if kind == "attack-masks":
        makers: tuple[tuple[str, Callable[[str], Any]], ...] = (
            ("weight", float), ("share", float), ("label", str), ("rounds", int), ("kind", str),
        )  # fmt: skip
        chosen = {field: make(value) for (field, make), value in zip(makers, given, strict=False)}
        return harden.AttackMasks(**{"weight": 2.0, "share": 0.05, **chosen})
    if kind in ("sattend", "sattend-token"):
        mode = "token" if kind == "sattend-token" else "unit"
        return harden.SAttend(float(given[0]) if given else 0.2, mode)
    if kind not in DEFENCES or given:
        raise SystemExit(f"expected methods as --help names them, got {name}")
    return DEFENCES.make(kind)


def chosen(names: str) -> list[str]:
    """`sweep` among them stands for all presets."""
    given = [name for name in names.split(",") if name]
    return [part for name in given for part in (PRESETS if name == "sweep" else (name,))]
