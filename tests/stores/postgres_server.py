"""A real PostgreSQL for the length of a block, on a socket in its own folder; or a skip."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _programs() -> dict[str, str]:
    """Return the paths of initdb and pg_ctl, on the PATH or in Debian's folder."""
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    path = os.pathsep.join([*map(str, places), os.environ.get("PATH", "")])
    found = {name: shutil.which(name, path=path) for name in ("initdb", "pg_ctl")}
    missing = [name for name, place in found.items() if place is None]
    if missing:
        pytest.skip(f"PostgreSQL is not on this machine: no {missing[0]}")
    return {name: str(place) for name, place in found.items()}


def _user() -> dict[str, object]:
    """Return the user of its package if the tests run as root, since PostgreSQL does not."""
    if os.geteuid() != 0:
        return {}
    try:
        account = pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


@contextmanager
def postgres(folder: Path) -> Generator[str]:
    """Yield the address of a private database in `folder`, whose path must be short."""
    programs = _programs()
    user = _user()
    if user:
        os.chown(folder, int(str(user["user"])), int(str(user["group"])))
    data = folder / "data"
    log = folder / "log"

    def run(*command: object) -> None:
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **user,
        )
        assert done.returncode == 0, done.stderr + (
            log.read_text() if log.exists() else ""
        )

    run(
        programs["initdb"],
        "-D",
        data,
        "-U",
        "owner",
        "-A",
        "trust",
        "--no-sync",
        "-E",
        "UTF8",
    )
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    run(programs["pg_ctl"], "-D", data, "-l", log, "-w", "-o", options, "start")
    try:
        yield f"postgresql://owner@/postgres?host={folder}"
    finally:
        run(programs["pg_ctl"], "-D", data, "-m", "immediate", "-w", "stop")
