"""The benchmarks themselves: that they measure what they say, and that what is published is what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import environments, floor, instructions, opcodes, page, results, tables, timing
from benchmarks.variants import VARIANTS, with_measures
from benchmarks.workload import Load

ROOT = Path(__file__).resolve().parents[2]
CASE = "insert_one/sync"

COUNTS: instructions.Counts = {
    variant: {CASE: count * 1000}
    for variant, count in {
        "plain": 400,
        "plain_old": 500,
        "engine": 420,
        "no_sdk": 436,
        "off": 500,
        "off_metrics": 580,
        "retried": 700,
        "recording": 840,
        "noop_listeners": 450,
        "contrib_off": 500,
        "contrib": 650,
        "floor_recording": 400,
        "ddtrace": 900,
        "logfire": 1000,
    }.items()
}


def in_a_process(script: str) -> Any:
    """The replayed transport and the providers change the whole process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", ["plain", "recording"])
def test_the_replayed_transport_gives_real_answers(variant: str) -> None:
    found = in_a_process(
        f"""
        import asyncio, json, os
        from benchmarks import replay
        from benchmarks.workload import Bench

        bench = Bench({variant!r}, yields=True)
        coll = bench.client("sync").bench.coll
        sync = [
            coll.find_one({{"_id": 1}})["name"],
            coll.insert_one({{"a": 1}}).acknowledged,
            coll.update_one({{"_id": 1}}, {{"$set": {{"stock": 7}}}}).matched_count,
            len(list(coll.aggregate(replay.PIPELINE))),
        ]
        bench.replay.find_many()
        sync.append(len(list(coll.find({{}}, batch_size=replay.BATCH))))
        bench.replay.find_one()

        async def run():
            coll = bench.client("async").bench.coll
            answers = [
                (await coll.find_one({{"_id": 1}}))["name"],
                (await coll.insert_one({{"a": 1}})).acknowledged,
                (await coll.update_one({{"_id": 1}}, {{"$set": {{"stock": 7}}}})).matched_count,
                len(await (await coll.aggregate(replay.PIPELINE)).to_list()),
            ]
            bench.replay.find_many()
            answers.append(len(await coll.find({{}}, batch_size=replay.BATCH).to_list()))
            return answers

        print(json.dumps([sync, asyncio.run(run())]), flush=True)
        os._exit(0)
        """
    )
    assert found == [["item 1", True, 1, 1, 1000]] * 2


def test_the_floor_has_as_many_attributes_as_an_operation() -> None:
    """Otherwise the floor would be too low, or what is ours would look cheaper than it is."""
    found = in_a_process(
        """
        import json, os
        import otel_retry
        from benchmarks.workload import Bench, Load
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        bench, load = Bench("plain"), Load.parse("insert_one/sync")
        spans, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(spans))
        otel_retry.instrument(tracer_provider=tracers, meter_provider=MeterProvider([reader]))
        bench.run(load, 10)

        def histograms():
            found = {}
            for resource in reader.get_metrics_data().resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.data.data_points:
                            if hasattr(point, "bucket_counts"):
                                key = metric.name, tuple(sorted(point.attributes))
                                found[key] = found.get(key, 0) + point.count
            return found

        before = histograms()
        bench.run(load, 10)
        records = [
            [key[1], (count - before.get(key, 0)) / 10]
            for key, count in histograms().items()
            if count != before.get(key, 0)
        ]
        command, operation = spans.get_finished_spans()[-2:]
        print(json.dumps([sorted(operation.attributes), sorted(command.attributes), records]), flush=True)
        os._exit(0)
        """
    )
    operation, command, records = found
    assert operation == sorted(floor.OPERATION_ATTRIBUTES)
    assert command == sorted(floor.COMMAND_ATTRIBUTES)
    assert sorted(records) == sorted(
        [sorted(attributes), 1.0]
        for attributes in (floor.DURATION_ATTRIBUTES, floor.POOL_ATTRIBUTES, floor.POOL_ATTRIBUTES)
    )


def test_attempts_are_really_made() -> None:
    found = in_a_process(
        """
        import json, os
        from benchmarks.workload import Bench, Load
        from pymongo import monitoring

        class Heard(monitoring.CommandListener):
            names = []
            def started(self, event): self.names.append(event.command_name)
            def succeeded(self, event): pass
            def failed(self, event): pass

        monitoring.register(Heard())
        bench = Bench("engine")
        heard = []
        for case in ("insert_one/sync", "insert_one/sync/attempts=5", "find_one/async/attempts=3"):
            Heard.names.clear()
            bench.run(Load.parse(case), 2)
            heard.append(len(Heard.names))
        print(json.dumps(heard), flush=True)
        os._exit(0)
        """
    )
    assert found == [2, 10, 6]


@pytest.mark.parametrize(("more", "fails"), [(1.04, False), (1.06, True)])
def test_a_check_fails_at_more_than_five_percent(more: float, fails: bool) -> None:
    now = {variant: dict(cases) for variant, cases in COUNTS.items()}
    now["recording"][CASE] = round(now["recording"][CASE] * more)
    found = instructions.regressions(now, COUNTS)
    assert [line.split()[0] for line in found] == (["recording"] if fails else [])


def test_a_machine_on_which_all_costs_more_is_no_regression() -> None:
    now = {variant: {CASE: cases[CASE] * 2} for variant, cases in COUNTS.items()}
    assert instructions.regressions(now, COUNTS) == []


def test_of_two_counts_the_smaller_one_holds() -> None:
    once = {"plain": {CASE: 400}, "recording": {CASE: 900}}
    again = {"plain": {CASE: 410}, "recording": {CASE: 800}}
    assert instructions.least(once, again) == {"plain": {CASE: 400}, "recording": {CASE: 800}}
    assert instructions.least(once, {}) == once


def test_another_sdk_or_pymongo_judges_nothing_and_another_patch_of_python_does() -> None:
    before = {
        "python": "3.11.7",
        "pymongo": "4.19.0",
        "opentelemetry-api": "1.45.0",
        "opentelemetry-sdk": "1.45.0",
    }
    assert instructions.other_versions(before, before | {"python": "3.11.9"}) == []
    assert instructions.other_versions(before, before | {"python": "3.12.0"}) == [
        "python 3.12, the baseline has 3.11"
    ]
    assert instructions.other_versions(
        before, before | {"opentelemetry-sdk": "1.46.0", "pymongo": "4.20.0"}
    ) == [
        "pymongo 4.20.0, the baseline has 4.19.0",
        "opentelemetry-sdk 1.46.0, the baseline has 1.45.0",
    ]


def test_bars_are_what_is_added_by_what_is_added() -> None:
    stands = [
        (each.title, each.measure, None if each.stands is None else round(each.stands, 3))
        for each in instructions.bars(COUNTS, CASE)
    ]
    assert stands == [
        ("engine on, no SDK", "plain", 0.09),
        ("not sampled, metrics off", "contrib_off", 1.0),
        ("not sampled, metrics on", "contrib_off", 1.8),
        ("recording, all metrics", "contrib", 1.76),
        ('attempt_spans="retried"', "contrib", 1.2),
        ("recording, all metrics", "ddtrace", 1.1),
        ("recording, all metrics", "logfire", 0.733),
        ("recording, all metrics", "sentry", None),
        ("distance from the floor", "floor_recording", 1.1),
    ]


def test_the_table_of_bars_says_what_was_missed_and_where_the_floor_would_be() -> None:
    table = tables.bars({"counts": COUNTS})
    assert "| not sampled, metrics off | ≤ 1.0 times contrib, not sampled | 1.00 |  |" in table
    assert "| not sampled, metrics on | ≤ 1.6 times contrib, not sampled | 1.80 (missed) |  |" in table
    assert "| recording, all metrics | ≤ 1.0 times ddtrace | 1.10 (missed) | 1.00 |" in table
    assert "| recording, all metrics | ≤ 1.0 times sentry-sdk | not counted |  |" in table


def test_ddtrace_is_compared_with_the_pymongo_that_it_can_patch() -> None:
    assert instructions.added(COUNTS, "ddtrace", CASE) == 400_000
    assert with_measures(["ddtrace"]) == ["plain", "plain_old", "ddtrace"]


def test_what_a_slow_moment_does_to_a_whole_round_drops_out() -> None:
    def block(plain: float, adds: float) -> dict[str, timing.Block]:
        return {
            "plain": {"cpu": plain, "wall": plain * 2},
            "contrib": {"cpu": plain + adds, "wall": plain * 2 + adds},
        }

    rounds = [block(100e-6, 80e-6), block(900e-6, 82e-6), block(101e-6, 84e-6)]
    found = timing.summary(rounds)
    assert found["plain"] == {"cpu": {"median": 101.0}, "wall": {"median": 202.0}}
    assert found["contrib"]["cpu"] == {"median": 185.0, "added": 82.0, "spread": 1.0}


def test_a_column_is_one_variant_whatever_the_order_of_the_blocks() -> None:
    plain, ours = {"cpu": {"median": 100.0}}, {"cpu": {"median": 400.0, "added": 300.0, "spread": 5.0}}
    measured = {"insert_one/sync/1": {"recording": ours, "plain": plain}}
    measured["insert_one/sync/8"] = {"plain": plain, "recording": ours}
    assert tables.workers({"workers": measured}).splitlines()[2:] == [
        "| sync, 1 thread | 100 | +300 ± 5 |",
        "| sync, 8 threads | 100 | +300 ± 5 |",
    ]


def test_a_peer_that_does_not_install_is_reported(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise environments.NotInstalled("pip install ddtrace: no matching distribution")

    monkeypatch.setattr(environments, "python_of", refuse)
    _, failures = timing.measure(["ddtrace"], [], uri=None, rounds=1, report=lambda _: None)
    assert failures == {"ddtrace": "pip install ddtrace: no matching distribution"}
    assert "Not measured: ddtrace: pip install ddtrace" in tables.missing(failures)


def test_a_case_is_spelled_with_its_options() -> None:
    assert Load.parse("insert_one/async/attempts=3/clients=2") == Load(
        operation="insert_one", flavour="async", attempts=3, clients=2
    )


def test_code_is_told_apart_by_its_owner() -> None:
    assert opcodes.owner("/x/site-packages/opentelemetry/sdk/trace/__init__.py") == "OpenTelemetry SDK"
    assert opcodes.owner("/x/otel_retry/telemetry/spans.py") == "otel_retry, telemetry"
    assert opcodes.owner("/x/otel_retry/machine.py") == "otel_retry, engine"
    assert opcodes.owner("/usr/lib/python3.11/uuid.py") == "standard library"


def test_the_baseline_has_all_that_a_check_counts() -> None:
    before = instructions.baseline()
    assert set(before["instructions"]) == set(instructions.SMALL)
    for cases in before["instructions"].values():
        assert set(instructions.SMALL_CASES) <= set(cases)
    assert {"python", "pymongo", "opentelemetry-sdk"} <= set(before["versions"])


def test_what_is_published_is_what_was_measured() -> None:
    for path, text in page.files(results.load()).items():
        assert path.read_text() == text, f"{path.name} is out of date; run: make bench-docs"


def test_the_picture_is_a_picture_with_a_bar_for_each() -> None:
    measured = results.load()["instructions"]
    drawn = ET.fromstring(page.picture_of_counts(measured))
    shown = [variant for variant in page.IN_PICTURE if variant in measured["counts"]]
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == len(shown) + 1


def test_every_variant_that_the_tables_name_exists() -> None:
    assert {*page.IN_PICTURE, *page.IN_README} <= set(VARIANTS)
    assert set(tables.FLOOR_TITLES) == set(floor.FLOORS)
