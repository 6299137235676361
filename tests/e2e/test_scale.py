"""The bytes that docs/scale.md reckons with are the bytes that are sent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from scripts.backends import ROOT
from tests.e2e.sizes import measure

if TYPE_CHECKING:
    from otel_retry.mongod import Deployment

ROW = re.compile(
    r"^\| operation, (first try|retried once|retried three times) \| (\d)[^|]*\| ([\d,]+) \|", re.MULTILINE
)
MEASURED = {"first try": "find", "retried once": "retried once", "retried three times": "retried three times"}


def test_the_page_about_scale_gives_the_size_of_spans_within_a_fifth(deployment: Deployment):
    figures = measure(deployment)
    rows = ROW.findall((ROOT / "docs" / "scale.md").read_text(encoding="utf-8"))
    assert len(rows) == len(MEASURED)
    for title, spans, size in rows:
        name = MEASURED[title]
        assert figures[f"{name}: spans per operation"] == int(spans)
        assert figures[f"{name}: bytes per span"] == pytest.approx(int(size.replace(",", "")), rel=0.2)
