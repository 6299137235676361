"""The command line, `otel-retry`: needs the extra `cli` (click, rich)."""

from __future__ import annotations

import sys


def main() -> None:
    """Without the extra: one line that says how to get it, instead of a traceback."""
    try:
        from otel_retry.cli.main import cli  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        sys.exit(f"otel-retry: {missing.name} is not installed; pip install 'otel-retry[cli]'")
    cli()
