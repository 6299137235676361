"""The verdict can fail, the schedule follows from its seed, and a short run ends well."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    PyMongoError,
    WriteConcernError,
)

from otel_retry.events import Attempt, Failure, Kind, Phase
from otel_retry.history import attach
from tests.chaos import ledger, page, telemetry_ledger
from tests.chaos.__main__ import parsed, seeds_of
from tests.chaos.faults import KINDS, schedule
from tests.chaos.ledger import Stream
from tests.chaos.resources import Resources, Sample, judge_memory
from tests.chaos.telemetry_ledger import Reported
from tests.chaos.workload import complaint_about, finish

ROOT = Path(__file__).parents[2]


class TestLedgerOfData:
    @staticmethod
    def stream(*, issued: int, failed: set[int] = frozenset(), places: tuple[str, ...] = ("",)) -> Stream:  # type: ignore[assignment]
        stream = Stream("s", places)
        for number in range(issued):
            try:
                with stream.write() as written:
                    assert written == number
                    if number in failed:
                        raise OSError
            except OSError:
                pass
        return stream

    def judged(self, stream: Stream, **places: dict[int, int]) -> ledger.Verdict:
        found = {place.removeprefix("_"): Counter(times) for place, times in places.items()}
        return ledger.judge({"s": stream}, {"s": found})

    def test_what_is_there_once_is_no_complaint(self) -> None:
        verdict = self.judged(self.stream(issued=3), _={0: 1, 1: 1, 2: 1})
        assert verdict.complaints() == []
        assert (verdict.acknowledged, verdict.unacknowledged) == (3, 0)

    def test_an_acknowledged_write_that_is_not_there_is_lost(self) -> None:
        verdict = self.judged(self.stream(issued=3), _={0: 1, 2: 1})
        assert verdict.lost == ["s 1"]
        assert verdict.complaints() == ["1 lost: s 1"]

    def test_a_write_that_is_there_twice_is_doubled_whether_acknowledged_or_not(self) -> None:
        verdict = self.judged(self.stream(issued=2, failed={1}), _={0: 2, 1: 2})
        assert verdict.doubled == ["s 0 (2 times)", "s 1 (2 times)"]

    @pytest.mark.parametrize(("times", "applied"), [(0, 0), (1, 1)])
    def test_an_unacknowledged_write_may_be_there_or_not(self, times: int, applied: int) -> None:
        verdict = self.judged(self.stream(issued=1, failed={0}), _={0: times})
        assert verdict.complaints() == []
        assert (verdict.unacknowledged, verdict.applied_unacknowledged) == (1, applied)

    def test_a_write_of_several_documents_must_be_in_each(self) -> None:
        stream = self.stream(issued=1, places=("a", "b"))
        assert self.judged(stream, a={0: 1}).lost == ["s 0 in b"]

    def test_what_nobody_wrote_is_a_phantom(self) -> None:
        assert self.judged(self.stream(issued=1), _={0: 1, 7: 1}).phantom == ["s 7"]
        assert ledger.judge({}, {"t": {"": Counter({0: 1})}}).phantom == ["t: no such stream"]

    def test_a_change_stream_shows_each_event_once(self) -> None:
        verdict = ledger.judge_events({"a", "b", "c"}, Counter({"a": 1, "b": 2, "x": 1}), "consumer")
        assert verdict.lost == ["consumer: event c"]
        assert verdict.doubled == ["consumer: event b (2 times)"]
        assert verdict.phantom == ["consumer: event x"]


class TestLedgerOfTelemetry:
    GOOD = Reported(
        started=30,
        ended=30,
        operation_spans=12,
        command_spans=14,
        attempt_spans=1,
        transaction_spans=3,
        retries_by_operation=3,
        retry_events=3,
        retry_spans=3,
        retries_by_metric=3,
        durations_by_metric=12,
        budgets={"client-1": {"tokens": 998.1, "capacity": 1000, "consumed": 3, "deposited": 1.1}},
    )
    COMMANDS: ClassVar[Counter[str]] = Counter(find=12, killCursors=1, endSessions=1)

    def judged(self, **changes: Any) -> list[str]:
        return telemetry_ledger.judge(
            replace(self.GOOD, **changes),
            operations=10,
            commands=self.COMMANDS,
            changed_context=0,
            decides=True,
        )

    def test_what_adds_up_is_no_complaint(self) -> None:
        assert self.judged() == []

    def test_a_span_that_never_ended_is_found(self) -> None:
        assert self.judged(ended=29) == ["spans ended = spans started: 29 and 30"]

    @pytest.mark.parametrize(
        ("count", "rule"),
        [
            ("operation_spans", "operation spans = operations"),
            ("command_spans", "command spans = commands published"),
            ("retries_by_metric", "retries by metric = retries by operation span"),
            ("retry_events", "retry events = retries by operation span"),
            ("retry_spans", "attempts after the first by span = retries by metric"),
            ("durations_by_metric", "durations measured = operation spans"),
        ],
    )
    def test_a_count_that_is_one_off_is_found(self, count: str, rule: str) -> None:
        found = self.judged(**{count: getattr(self.GOOD, count) + 1})
        assert any(complaint.startswith(rule) for complaint in found)

    def test_another_ambient_context_is_found(self) -> None:
        found = telemetry_ledger.judge(
            self.GOOD, operations=10, commands=self.COMMANDS, changed_context=1, decides=True
        )
        assert found == ["operations that left another context: 1 and 0"]

    @pytest.mark.parametrize(
        ("budget", "complaint"),
        [
            ({"tokens": 998.2}, "client-1 has 998.2 tokens, not 998.1"),
            ({"tokens": 1000.1, "deposited": 3.1}, "client-1 has 1000.1 tokens of 1000"),
            ({"tokens": 1000.1, "deposited": 2.1, "consumed": 2}, "2 tokens were taken for 3 retries"),
        ],
    )
    def test_a_bucket_whose_tokens_do_not_add_up_is_found(
        self, budget: dict[str, float], complaint: str
    ) -> None:
        found = self.judged(budgets={"client-1": {**self.GOOD.budgets["client-1"], **budget}})
        assert any(each.startswith(complaint) for each in found)


class TestErrors:
    @staticmethod
    def failed(error: PyMongoError, *servers: str | None, kind: Kind = Kind.NETWORK) -> PyMongoError:
        history = [
            Attempt(
                number=number,
                started=0.0,
                duration=0.1,
                delay=0.0,
                failure=Failure(error=error, phase=Phase.SENT, kind=kind, server=server),
                decision="retry",
            )
            for number, server in enumerate(servers, 1)
        ]
        attach(error, tuple(history))
        return error

    def test_one_with_its_attempts_and_their_servers_is_as_it_should_be(self) -> None:
        assert complaint_about(self.failed(AutoReconnect("gone"), "a:1", "b:2")) is None

    def test_one_without_attempts_is_found(self) -> None:
        complaint = complaint_about(AutoReconnect("gone"))
        assert complaint is not None
        assert "carries no attempts" in complaint

    def test_one_whose_attempt_names_no_server_is_found(self) -> None:
        complaint = complaint_about(self.failed(AutoReconnect("gone"), "a:1", None))
        assert complaint is not None
        assert "names no server in attempt 2" in complaint

    def test_where_no_server_was_found_none_can_be_named(self) -> None:
        assert complaint_about(self.failed(AutoReconnect("none"), None, kind=Kind.NO_SERVER)) is None

    def test_a_write_that_met_its_own_document_is_found(self) -> None:
        complaint = complaint_about(self.failed(DuplicateKeyError("E11000 duplicate key"), "a:1"))
        assert complaint is not None
        assert "met its own document" in complaint

    def test_an_error_of_gridfs_is_judged_by_the_bulk_write_behind_it(self) -> None:
        error = WriteConcernError("interrupted")
        error.__context__ = BulkWriteError({})
        assert complaint_about(error) is None
        error.__context__ = AutoReconnect("gone")
        assert complaint_about(error) is not None


class TestResources:
    def test_a_thread_and_a_descriptor_that_stay_are_found(self) -> None:
        resources = Resources(before=Sample(5, 20, 100.0), after=Sample(6, 21, 100.0))
        threads, descriptors = resources.judge()
        assert threads.startswith("6 threads, 5 before")
        assert descriptors == "21 file descriptors, 20 before"

    def test_memory_that_grows_all_the_time_is_found(self) -> None:
        assert judge_memory([100.0 + second for second in range(75)])

    def test_memory_that_comes_and_goes_is_flat(self) -> None:
        assert judge_memory([100.0 + 80 * (second % 10 == 0) for second in range(75)]) == []


class TestSchedule:
    def test_the_same_seed_makes_the_same_faults(self) -> None:
        assert schedule(5, 60) == schedule(5, 60)
        assert schedule(5, 60) != schedule(6, 60)

    def test_a_longer_run_begins_as_the_shorter_one_does(self) -> None:
        for short, long in zip(schedule(5, 30), schedule(5, 90), strict=True):
            assert long[: len(short)] == short

    def test_every_kind_comes_up(self) -> None:
        seen = {fault.kind for seed in range(20) for track in schedule(seed, 75) for fault in track}
        assert sorted(seen) == KINDS

    def test_within_a_track_a_fault_is_over_before_the_next_begins(self) -> None:
        for track in schedule(3, 200):
            for earlier, later in itertools.pairwise(track):
                assert earlier.at + earlier.seconds <= later.at


class TestCommandLine:
    @pytest.mark.parametrize(("text", "seeds"), [("7", [7]), ("1-4", [1, 2, 3, 4]), ("2,5-6", [2, 5, 6])])
    def test_seeds_are_numbers_and_ranges(self, text: str, seeds: list[int]) -> None:
        assert seeds_of(text) == seeds
        assert seeds_of(parsed(["--seed", text]).seeds) == seeds

    def test_a_random_seed_is_one_seed(self) -> None:
        assert len(seeds_of("random")) == 1

    def test_a_coroutine_that_waits_is_not_for_the_synchronous_driver(self) -> None:
        class Wait:
            def __await__(self) -> Any:
                yield

        async def waits() -> None:
            await Wait()

        with pytest.raises(RuntimeError):
            finish(waits())


def test_the_page_shows_what_was_saved() -> None:
    rows = page.load(ROOT / "tests" / "chaos" / "results.jsonl")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.by_seed(rows) in text
    assert page.compared(rows) in text


@pytest.mark.timeout(900)
def test_nothing_is_lost_doubled_or_leaked_in_a_short_run() -> None:
    """In a process of its own: what threads, sockets and memory it leaves is part of the verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seed", "7", "--duration", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
