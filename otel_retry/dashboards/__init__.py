"""The Grafana dashboards and the Prometheus rules, as they are shipped.

They lie in the top-level folder `dashboards/`, where people and Compose find them; the wheel carries them inside this
package. `build` makes the dashboards anew and needs grafana-foundation-sdk; reading needs nothing.
"""

from __future__ import annotations

from pathlib import Path

DASHBOARDS = ("retries.json", "client.json", "fleet.json")
RULES = ("recording-rules.yaml", "alerts.yaml")
FILES = DASHBOARDS + RULES

_HERE = Path(__file__).resolve().parent
_IN_THE_WHEEL = _HERE / "files"
_IN_THE_REPOSITORY = _HERE.parents[1] / "dashboards"


def folder() -> Path:
    """Where the files are: in the wheel, or in the repository for an editable install."""
    return _IN_THE_WHEEL if _IN_THE_WHEEL.is_dir() else _IN_THE_REPOSITORY


def read(name: str) -> str:
    """One of `FILES`, as text."""
    return (folder() / name).read_text(encoding="utf-8")
