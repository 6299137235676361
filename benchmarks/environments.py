"""The peers' virtual environments, `.venvs/bench-*`: one each, so that no peer's dependencies decide another's versions."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venvs"

# ddtrace patches PyMongo up to 4.17; from 4.18 on it fails, so it is measured against plain PyMongo of that version.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "ddtrace": ("ddtrace", "pymongo==4.17.0"),
    "logfire": ("logfire[pymongo]", "pymongo"),
    "sentry": ("sentry-sdk", "pymongo"),
    "newrelic": ("newrelic", "pymongo"),
}

_one_at_a_time = threading.Lock()
_refused: dict[str, str] = {}


class NotInstalled(Exception):  # noqa: N818 - goes into the table as it is
    """A peer's environment could not be made, and why."""


def python_of(environment: str | None, *, install: bool = True) -> str:
    """The interpreter of an environment, which is made first where it is missing. None: the one that runs this."""
    if environment is None:
        return sys.executable
    folder = FOLDER / f"bench-{environment}"
    python = folder / "bin" / "python"
    wanted = REQUIREMENTS[environment]
    stamp = folder / f".installed-{hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:12]}"
    with _one_at_a_time:
        if stamp.exists():
            return str(python)
        if not install:
            raise NotInstalled(f"{folder.name} has not been made")
        if environment not in _refused:
            _refused[environment] = _make(folder, python, wanted)
        if _refused[environment]:
            raise NotInstalled(_refused[environment])
        stamp.touch()
    return str(python)


def _make(folder: Path, python: Path, wanted: tuple[str, ...]) -> str:
    """Why it could not be made; empty if it could."""
    print(f"making {folder.relative_to(ROOT)}: {' '.join(wanted)}", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            return f"pip install {' '.join(wanted)}: {said[-1] if said else 'failed'}"
    return ""


def versions_in(python: str, *packages: str) -> dict[str, str]:
    """Of packages that are installed there."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
