"""MongoDB's OpenTelemetry tests, each with both drivers; `make conformance` prints the same ones line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.otel_spec import FLAVOURS, FOLDER_VARIABLE, Case, Server, cases, folder_to_run, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_retry import mongod

FOLDER = folder_to_run()
ABSENT = pytest.mark.skip(reason=f"nothing to run at {FOLDER}; {FOLDER_VARIABLE} names another folder")
CASES = (cases(FOLDER) if FOLDER.exists() else []) or [pytest.param(None, id="none", marks=ABSENT)]


@pytest.fixture(scope="module")
def server(deployment: mongod.Deployment) -> Iterator[Server]:
    with Server(deployment.uri) as described:
        yield described


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_spans_are_those_of_the_specification(case: Case, flavour: str, server: Server) -> None:
    outcome = run(case, flavour, server)
    if outcome.verdict == "skip":
        pytest.skip(outcome.reason)
    tree = "\n".join(line for span in outcome.spans for line in span.lines())
    assert outcome.verdict == "pass", f"{outcome.reason}\nrecorded:\n{tree}"
