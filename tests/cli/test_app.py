"""Help, version and usage errors, which do not wait for torch."""

from __future__ import annotations

import json
import sys
import time
from inspect import signature

import pytest

import keyhole
from command_line import PYTHON, finished, parts
from keyhole.cli.app import ORDER
from keyhole.core.errors import InputError
from sample_audits import whole

HEAVY = "torch transformers numpy plotly"
LOADED = """
import json, sys
heavy = sys.argv[1].split()
for work in sys.argv[2:]:
    try:
        exec(work)
    except SystemExit:
        pass
    print()
    print(json.dumps([work, [name for name in heavy if name in sys.modules]]))
"""


WORK = (  # of each, all that was done before it in the process is part
    "import keyhole; assert 'extract' in dir(keyhole)",
    "import keyhole; keyhole.__version__",
    "import keyhole.report.formats",
    "from keyhole.cli import app; app(['--version'])",
    "from keyhole.cli import app; app(['audit', '--help'])",
    "from keyhole.cli import app; app(['lab', 'plant', '--help'])",
    "from keyhole.cli import app; app(['frobnicate'])",
    "from keyhole.cli import app; app(['report', 'audit.json', '--output=junit=-'])",
    "from keyhole.cli import app; app(['policy', 'audit.json'])",
)


def test_what_needs_no_torch_does_not_load_it(tmp_path):
    whole().save(tmp_path / "audit.json")
    done = finished([*PYTHON, "-c", LOADED, HEAVY, *WORK], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    assert [json.loads(line) for line in lines] == [[work, []] for work in WORK]


def test_help_lists_every_command_and_comes_at_once(tmp_path):
    started = time.monotonic()
    done = finished(
        [*PYTHON, "-X", "importtime", "-m", "keyhole", "--help"], cwd=tmp_path
    )
    assert time.monotonic() - started < 10  # 0.4 s on a machine that does nothing else
    assert all(f" {name} " in done.stdout for name in ORDER)
    assert " torch" not in done.stderr


def test_flags_are_shown_without_a_type():
    assert (
        "<bool>" not in finished([*PYTHON, "-m", "keyhole", "audit", "--help"]).stdout
    )


@pytest.mark.parametrize("name", ORDER)
def test_every_option_is_explained_in_a_phrase(name):
    for title, made in parts(name).items():
        for parameter in made.params:
            words = getattr(parameter, "help", None) or ""
            assert words, f"{title} {parameter.name}"
            assert words[0].isupper() or words.startswith("."), (
                f"{title} {parameter.name}: {words}"
            )
            assert words.endswith((".", ")")), f"{title} {parameter.name}: {words}"


def test_the_packages_are_what_people_find():
    assert set(dir(keyhole)) == set(keyhole.__all__)
    for name in keyhole.__all__:
        assert getattr(keyhole, name) is not None
    with pytest.raises(
        AttributeError, match="module 'keyhole' has no attribute 'frobnicate'"
    ):
        keyhole.frobnicate  # noqa: B018


def test_audit_is_a_package_that_can_be_called():
    from keyhole.audit.run import audit

    assert callable(keyhole.audit)
    assert keyhole.audit is sys.modules["keyhole.audit"]
    assert keyhole.audit.run.audit is audit
    assert "target" in signature(audit).parameters
    with pytest.raises(InputError, match=r"no-such-target"):
        keyhole.audit("no-such-target")
    (finding, *_) = keyhole.audit(keyhole.oracle.plant(dim=2)).findings
    assert finding.exposed
