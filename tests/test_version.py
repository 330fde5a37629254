"""The package, the command, results and a checkout all have the same version."""

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
    """With -S there are no site-packages, so nothing that was installed, not even torch."""
    place = f"import sys; sys.path.insert(0, {str(root / 'src')!r})"
    code = f"{place}; import keyhole; print(keyhole.__version__)"
    done = finished([sys.executable, "-S", "-c", code], cwd=tmp_path)
    assert done.stdout == f"{__version__}\n", done.stderr
