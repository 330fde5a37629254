"""Options by which an audit is judged: a policy, an environment, a baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from keyhole.assess import Assessment, Policy, assess, compared, decided, find_policy, read_policy
from keyhole.core import Audit
from keyhole.core.errors import InputError

PolicyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What fails and what is ignored: a keyhole.toml, or a pyproject.toml with "
        "[tool.keyhole]. By default the one in this folder, if there is one.",
    ),
]
Environment = Annotated[
    str | None,
    typer.Option(
        envvar="KEYHOLE_ENVIRONMENT", help="The environment of the policy, such as production."
    ),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(
        metavar="AUDIT.json",
        help="An earlier audit of the same target: what is no worse than there does not fail.",
    ),
]


@dataclass(frozen=True)
class Judge:
    """A policy and a baseline, read before any work begins."""

    policy: Policy
    baseline: Audit | None

    @classmethod
    def of(cls, policy: Path | None, environment: str | None, baseline: Path | None) -> Judge:
        chosen = policy or find_policy(Path())
        if chosen is None and environment is not None:
            raise InputError(
                "expected a policy with environments, got none: write a keyhole.toml, or name one "
                "with --policy"
            )
        read = Policy() if chosen is None else read_policy(chosen, environment)
        return cls(read, None if baseline is None else Audit.load(baseline))

    def against(self, baseline: Audit | None) -> Judge:
        """The same policy, with another baseline."""
        return replace(self, baseline=baseline)

    def __call__(self, audit: Audit) -> Assessment:
        assessment = assess(audit, override=self.policy.severity)
        if self.baseline is not None:
            old = assess(self.baseline, override=self.policy.severity)
            assessment = compared(assessment, old)
        return decided(assessment, self.policy)
