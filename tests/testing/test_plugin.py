"""The plugin, in runs of pytest of its own: loaded lazily, an audit made once a session."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import keyhole
import tiny_models as tiny
from keyhole.models import load_model

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[2]
# As the entry point would load it; the entry point itself is blocked where Keyhole is
# installed.
PLUGIN = ("-p", "no:keyhole", "-p", "keyhole.testing.plugin", "-p", "no:cacheprovider")
TESTS = """
    import pytest
    from keyhole import oracle
    from keyhole.testing import CouldNotCheck, assert_withstands

    def test_leak():
        assert_withstands("model", "hidden:1", ["w1 w2 w3"])

    def test_budget():
        assert_withstands(oracle.plant(dim=5, seed=2), "scores", budget=10)

    def test_unchecked():
        assert_withstands("model", "gradient", ["w1 w2 w3"])

    @pytest.mark.parametrize("number", range(3))
    def test_whole(keyhole_audit, number):
        audit = keyhole_audit("planted.safetensors")
        assert audit.findings
        assert keyhole_audit("planted.safetensors") is audit
"""


@pytest.fixture(autouse=True, scope="module")
def _imported(tmp_path_factory):
    """All that loading a model imports, once: what an inner run imports, pytester
    forgets again, and torch warns where its kernels are registered a second time.
    """
    where = tmp_path_factory.mktemp("imported") / "model"
    tiny.save("bert", where)
    load_model(where)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a model, a planted endpoint and tests of both."""
    tiny.save("bert", pytester.path / "model")
    keyhole.oracle.save(
        keyhole.oracle.plant(dim=4, seed=3), pytester.path / "planted.safetensors"
    )
    pytester.makepyfile(test_model=TESTS)
    return pytester


def test_failures_say_what_leaked(project):
    result = project.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: *hidden states of layer 1*Fix: *",
            "E*CouldNotCheck: could not check:*",
        ]
    )


def test_an_audit_is_made_once_a_session(pytester):
    pytester.makepyfile("""
        from keyhole import oracle

        class Counting:
            dim, asked = 4, 0
            inner = oracle.plant(dim=4, seed=3)

            def __call__(self, sequences):
                Counting.asked += len(sequences)
                return self.inner(sequences)

        TARGET = Counting()

        def test_first(keyhole_audit):
            keyhole_audit(TARGET)
            assert TARGET.asked

        def test_again(keyhole_audit):
            before = Counting.asked
            keyhole_audit(TARGET)
            assert Counting.asked == before
            keyhole_audit(TARGET, seed=1)
            assert Counting.asked > before
    """)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=2)


def test_an_audit_that_fails_is_not_remembered(pytester):
    pytester.makepyfile("""
        import pytest
        from keyhole.core.errors import InputError

        @pytest.mark.parametrize("number", range(2))
        def test_it(keyhole_audit, number):
            with pytest.raises(InputError, match="there is no nowhere.safetensors"):
                keyhole_audit("nowhere.safetensors")
    """)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=2)


def test_help_says_what_there_is(pytester):
    result = pytester.runpytest_inprocess(*PLUGIN, "--fixtures")
    result.stdout.fnmatch_lines(["keyhole_audit*"])


def test_who_does_not_use_it_does_not_load_torch(pytester, monkeypatch):
    """Through the entry point that pyproject.toml declares, as an installed Keyhole has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    about = pytester.mkdir("site") / "keyhole_here-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: keyhole-as-installed\nVersion: 1.0\n"
    )
    points = project["entry-points"]["pytest11"]
    (about / "entry_points.txt").write_text(
        "[pytest11]\n"
        + "".join(f"{name} = {module}\n" for name, module in points.items())
    )
    pytester.makepyfile("""
        import sys

        def test_it(request):
            assert request.config.pluginmanager.has_plugin("keyhole")
            loaded = {name.split(".")[0] for name in sys.modules}
            assert not loaded & {"torch", "transformers", "numpy", "rich", "jinja2", "plotly"}
    """)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{about.parent}")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_the_tests_of_the_documentation(pytester):
    """As docs/pipelines.md has them: what they promise is what happens."""
    text = (ROOT / "docs" / "pipelines.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    (block,) = [part for part in blocks if "def test" in part]
    pytester.makepyfile(test_documented=block)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=3, xfailed=1)
