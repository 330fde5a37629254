"""Where teams work: the GitHub action and the GitLab job, really run.

The scripts of action.yml and ci/gitlab.yml are run by a shell, with the environment
that a runner would give them and the real `keyhole`; what a runner does besides
(fetching actions, uploading) is not. Where only words count that reach `keyhole`, a
script in its place writes them down.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from command_line import PYTHON, parts
from keyhole import oracle
from keyhole.report.formats import FORMATS

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
JOB = yaml.safe_load((ROOT / "ci" / "gitlab.yml").read_text("utf-8"))["keyhole-audit"]
STEPS = ACTION["runs"]["steps"]
(AUDIT,) = [step for step in STEPS if step.get("id") == "audit"]
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@pytest.fixture
def place(tmp_path):
    """A folder with a target that gives its weights away, and `keyhole` on the path."""
    oracle.save(oracle.plant("head", dim=4, seed=0), tmp_path / "target.safetensors")
    folder = tmp_path / "bin"
    folder.mkdir()
    words = " ".join(f"'{word}'" for word in PYTHON)
    (folder / "keyhole").write_text(f'#!/bin/sh\nexec {words} -m keyhole "$@"\n')
    (folder / "keyhole").chmod(0o755)
    return tmp_path


def run(
    script, place, shell=("bash", "--noprofile", "--norc", "-eo", "pipefail"), **given
):
    """As GitHub's runner runs a script: from a file, in the working folder."""
    (place / "script.sh").write_text(script)
    env = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", **given}
    return subprocess.run(
        [*shell, "script.sh"],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )


def audit(place, **inputs):
    """The audit step with these inputs, and the defaults of the others."""
    files = {name: place / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    values = {
        name: about.get("default", "") for name, about in ACTION["inputs"].items()
    } | inputs

    def filled(text):
        return EXPRESSION.sub(
            lambda match: values[match[1].removeprefix("inputs.")], text
        )

    env = {name: filled(text) for name, text in AUDIT["env"].items()}
    done = run(
        AUDIT["run"], place, **env, **{name: str(file) for name, file in files.items()}
    )
    outputs = dict(
        line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines()
    )
    return done, outputs, files["GITHUB_STEP_SUMMARY"].read_text()


def test_no_text_of_a_caller_is_pasted_into_a_script():
    for step in STEPS:
        assert "${{" not in step.get("run", "")
    assert "$[[" not in json.dumps(JOB)
    names = {match for step in STEPS for match in EXPRESSION.findall(json.dumps(step))}
    inputs = {
        name.removeprefix("inputs.")
        for name in names
        if re.fullmatch(r"inputs\.[\w-]+", name)
    }
    assert inputs | {"upload-sarif"} == set(ACTION["inputs"])


def test_every_option_of_the_scripts_is_one_of_the_command():
    known = {
        flag for parameter in parts("audit")["audit"].params for flag in parameter.opts
    }
    for script in (AUDIT["run"], *JOB["script"]):
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", script))
        assert {"--policy", "--environment", "--baseline", "--output"} <= used <= known


def test_the_example_of_a_report_is_of_a_format(root):
    (named,) = re.findall(
        r"FORMAT=FILE a line, such as (\w+)=", (root / "action.yml").read_text()
    )
    assert named in FORMATS


def test_findings_are_handed_over_also_when_the_audit_fails():
    (upload,) = [step for step in STEPS if "upload-sarif" in step.get("uses", "")]
    assert upload["if"].startswith("${{ always() &&")
    assert upload["with"]["sarif_file"] == "${{ steps.audit.outputs.sarif }}"
    assert STEPS.index(upload) > STEPS.index(AUDIT)
    assert JOB["artifacts"]["when"] == "always"
    assert set(JOB["artifacts"]["reports"]) == {"junit"}


@pytest.mark.release
def test_the_action_reports_and_keeps_the_exit_code(place):
    done, outputs, summary = audit(
        place,
        target="target.safetensors",
        outputs="junit=reports/checks.xml\n",
        folder="reports",
    )
    assert done.returncode == 1, done.stderr
    assert outputs == {
        "exit-code": "1",
        "json": "reports/keyhole.json",
        "page": "reports/keyhole.html",
        "sarif": "reports/keyhole.sarif",
    }
    log = json.loads((place / outputs["sarif"]).read_text("utf-8"))
    assert log["version"] == "2.1.0"
    assert log["runs"][0]["results"]
    assert summary == (place / "reports/keyhole.md").read_text("utf-8")
    assert (place / "reports/keyhole.xml").is_file()


@pytest.mark.release
def test_wrong_input_ends_with_two_and_uploads_nothing(place):
    done, outputs, summary = audit(place, target="missing.safetensors")
    assert (done.returncode, outputs, summary) == (2, {"exit-code": "2"}, "")
    done, outputs, _ = audit(place, target="demo", folder="a\nsarif=b")
    assert (done.returncode, outputs) == (2, {})


HOSTILE = (
    "$(touch ran)",
    "`touch ran`",
    "; touch ran",
    "--version",
    "' ; touch ran ; '",
    "a\nb",
)


def words_that_arrive(place):
    """Instead of `keyhole`: each word on its own, ended by NUL."""
    (place / "bin" / "keyhole").write_text(
        "#!/bin/sh\nprintf '%s\\0' \"$@\" > words; exit 3\n"
    )
    return lambda: (place / "words").read_text().split("\0")[:-1]


@pytest.mark.release
@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_caller_gives_is_never_run(place, text):
    words = words_that_arrive(place)
    done, outputs, _ = audit(
        place, target=text, data=text, baseline=text, environment=text
    )
    assert (done.returncode, outputs) == (3, {"exit-code": "3"})
    assert words()[0:2] == ["audit", "--force"]
    assert words()[-2:] == ["--", text]
    given = {f"--data={text}", f"--baseline={text}", f"--environment={text}"}
    assert given == set(words()) - {
        word for word in words() if "keyhole-reports" in word
    } - {
        "audit",
        "--force",
        "--",
        text,
    }
    variables = {**JOB["variables"], "KEYHOLE_TARGET": text, "KEYHOLE_MODEL": text}
    done = run("\n".join(JOB["script"]), place, ("sh", "-e"), **variables)
    assert done.returncode == 3
    assert words()[-3:] == [f"--model={text}", "--", text]
    assert not (place / "ran").exists()


def test_lines_become_options(place):
    words = words_that_arrive(place)
    audit(
        place,
        target="t",
        model="a b",
        outputs="junit=x\n\nhtml=y\n",
        authorized="true",
        policy="p",
    )
    assert words()[-7:] == [
        "--model=a b",
        "--policy=p",
        "--authorized",
        "--output=junit=x",
        "--output=html=y",
        "--",
        "t",
    ]


@pytest.mark.release
def test_the_job_of_gitlab(place):
    variables = {**JOB["variables"], "KEYHOLE_TARGET": "target.safetensors"}
    done = run("\n".join(JOB["script"]), place, ("sh", "-e"), **variables)
    assert done.returncode == 1, done.stderr
    (report,) = JOB["artifacts"]["reports"].values()
    assert (place / report).read_text("utf-8").startswith("<?xml")
    assert json.loads((place / "keyhole-reports/keyhole.sarif").read_text("utf-8"))[
        "runs"
    ]
