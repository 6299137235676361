"""What was measured, kept as JSON: `.cache/bench.json` for a run of one's own, `results.json` beside this for the published
one, from which docs/performance.md and the README's figures are made. Each part says where and with what it was measured.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import environments

PUBLISHED = Path(__file__).with_name("results.json")
PRIVATE = environments.ROOT / ".cache" / "bench.json"

_PACKAGES = ("pymongo", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-instrumentation-pymongo")
_PEERS = {
    "ddtrace": ("ddtrace", "pymongo"),
    "logfire": ("logfire",),
    "sentry": ("sentry-sdk",),
    "newrelic": ("newrelic",),
}


def versions() -> dict[str, str]:
    """What counts depend on."""
    return {
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
        **environments.versions_in(sys.executable, *_PACKAGES),
    }


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    cores = 0
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                cores += 1
    except OSError:
        pass  # not Linux
    return {"cpu": cpu, "cores": str(cores or "?"), "kernel": f"{platform.system()} {platform.release()}"}


def peers() -> dict[str, str]:
    """Versions of the peers whose environments exist."""
    found: dict[str, str] = {}
    for environment, packages in _PEERS.items():
        try:
            python = environments.python_of(environment, install=False)
        except environments.NotInstalled:
            continue
        there = environments.versions_in(python, *packages)
        found |= {
            (f"pymongo (for {environment})" if package == "pymongo" else package): version
            for package, version in there.items()
        }
    return found


def load(path: Path = PUBLISHED) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(path: Path, part: str, measured: dict[str, Any]) -> None:
    """Replaces one part; the others stay as they are."""
    everything = load(path)
    everything[part] = {
        **measured,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions() | peers(),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(everything, indent=1) + "\n")
