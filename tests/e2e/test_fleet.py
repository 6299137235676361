"""A small fleet: the fleet dashboard has an answer to everything, and the same one without the recording rules, so that
what tests/e2e/fleet.py compares is comparable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts import backends as installed
from tests.e2e.conftest import need
from tests.e2e.fleet import Fleet, Question, application, questions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_retry.mongod import Deployment

INSTANCES = 10


@pytest.fixture(scope="module")
def fleet(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    need(installed.PROMETHEUS)
    points = application(deployment)
    with Fleet(tmp_path_factory.mktemp("fleet"), points, instances=INSTANCES, minutes=20) as started:
        yield started


def test_every_instance_of_the_fleet_is_there(fleet: Fleet):
    assert fleet.prometheus.query("sum(job:db_client_instances:count)", at=fleet.end)[0]["value"][1] == str(
        INSTANCES
    )


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.panel)
def test_the_fleet_dashboard_shows_what_the_raw_series_say(fleet: Fleet, question: Question):
    def numbers(expression: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(
                sorted((name, value) for name, value in each["metric"].items() if name != "__name__")
            ): float(each["value"][1])
            for each in fleet.prometheus.query(expression, at=fleet.end)
        }

    recorded = numbers(question.recorded)
    assert recorded
    assert recorded == pytest.approx(numbers(question.raw))
    assert fleet.ask(question, question.recorded)
