"""Keyhole tells you what a Transformer's attention gives away, before someone else finds out.

    keyhole.audit("demo")                       every attack that applies, returned as an Audit
    keyhole.audit("./model", data="texts.tsv")
    keyhole.extract.run("target.safetensors")   weights from black-box answers
    keyhole.invert.run("problem.safetensors")   the input of one attention layer
    keyhole.recover.run("./model", ["leak.safetensors"])   text from what a model leaks
    keyhole.disrupt.run("./model", "dev.tsv")   predictions flipped by cutting attention
    keyhole.harden.run("./model", "train.tsv", "hardened")   training against that
    keyhole.report.render(audit)                the page of an audit

Each package also holds its methods, such as `keyhole.extract.SingleHead()(oracle)`.
Results print as a few lines, and are saved and loaded with `.save(path)` and
`.load(path)`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keyhole.version import __version__

if TYPE_CHECKING:
    from keyhole import (
        attention,
        core,
        data,
        disrupt,
        extract,
        harden,
        invert,
        models,
        oracle,
        recover,
        report,
    )
    from keyhole.audit.run import audit
    from keyhole.callback import AuditCallback

__all__ = [
    "AuditCallback",
    "__version__",
    "attention",
    "audit",
    "core",
    "data",
    "disrupt",
    "extract",
    "harden",
    "invert",
    "models",
    "oracle",
    "recover",
    "report",
]


if not TYPE_CHECKING:  # otherwise type checkers would allow any name

    def __getattr__(name: str) -> Any:
        # On demand, because packages load torch and `keyhole --help` should not wait
        # for it.
        if name not in __all__:
            raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
        try:
            if name == "AuditCallback":
                return importlib.import_module("keyhole.callback").AuditCallback
            return importlib.import_module(f"keyhole.{name}")
        except ModuleNotFoundError as error:
            from keyhole.core.errors import missing_extra

            raise missing_extra(error) or error from error


def __dir__() -> list[str]:
    return __all__
