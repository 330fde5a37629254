"""One version: of the package, of the command, of results, and of a checkout nobody installed."""

from __future__ import annotations

import sys

import keyhole
from command_line import finished
from keyhole.core import environment
from keyhole.version import __version__


def test_results_and_the_package_say_the_same():
    assert keyhole.__version__ == __version__ == environment()["keyhole"]


def test_people_cite_the_same(root):
    assert f"\nversion: {__version__}\n" in (root / "CITATION.cff").read_text("utf-8")


def test_a_checkout_that_nobody_installed_has_it_too(root, tmp_path):
    """-S: without site-packages, so without anything that was installed; and so without torch."""
    place = f"import sys; sys.path.insert(0, {str(root / 'src')!r})"
    code = f"{place}; import keyhole; print(keyhole.__version__)"
    done = finished([sys.executable, "-S", "-c", code], cwd=tmp_path)
    assert done.stdout == f"{__version__}\n", done.stderr
