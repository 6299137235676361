"""Makes the dashboards' JSON and the page that explains them, or says whether the ones that lie there are current.

    python -m otel_retry.dashboards.build            write dashboards/*.json and docs/dashboards.md
    python -m otel_retry.dashboards.build --check    write nothing; exit code 1 if anything would change

It works on a checkout and needs grafana-foundation-sdk (`pip install -e '.[dashboards]'`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from otel_retry.dashboards import client, fleet, retries
from otel_retry.dashboards.page import page
from otel_retry.dashboards.panels import render

ROOT = Path(__file__).resolve().parents[2]
BOARDS = (retries.BOARD, client.BOARD, fleet.BOARD)


def build(root: Path = ROOT) -> dict[Path, str]:
    """Every file that is made, with its content."""
    made = {root / "dashboards" / board.file: render(board) for board in BOARDS}
    made[root / "docs" / "dashboards.md"] = page(BOARDS, root / "docs" / "images")
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m otel_retry.dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    check = parser.parse_args(arguments).check
    changed = {
        path: text
        for path, text in build().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in changed.items():
        sys.stdout.write(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}\n")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
