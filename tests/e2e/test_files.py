"""The files of examples/stack: what they promise, and that the tests run them as they are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from otel_retry import semconv
from scripts import backends as installed
from tests.e2e import stack
from tests.e2e.conftest import need
from tests.e2e.stack import FILES

COLLECTORS = ("collector.yaml", "collector-agent.yaml", "collector-gateway.yaml")
ADDRESS = re.compile(r"_(HOST|PORT|OTLP)$|^GATEWAY_\d$")


def _compose(*arguments: str) -> subprocess.CompletedProcess[str]:
    need(installed.COMPOSE)
    return subprocess.run(
        [str(installed.COMPOSE.path()), "-format=json", *arguments],
        cwd=FILES,
        env={},
        check=False,
        capture_output=True,
        text=True,
    )


def _project(*files: str) -> dict[str, Any]:
    """Read, merged and checked as `docker compose config` does; only the variables stay as they are written."""
    read = _compose("-no-interpolation", *files)
    assert read.returncode == 0, read.stderr
    return json.loads(read.stdout)


@pytest.fixture(
    params=[("docker-compose.yaml",), ("docker-compose.yaml", "docker-compose.scaled.yaml")], ids=len
)
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the plain form and of the scaled one, as Compose understands them."""
    return _project(*request.param)["services"]


def test_compose_refuses_to_start_without_a_password_for_grafana():
    read = _compose("docker-compose.yaml")
    assert read.returncode != 0
    assert "set GRAFANA_PASSWORD" in read.stderr + read.stdout


def test_every_port_is_bound_to_the_loopback_interface(services: dict[str, Any]):
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 5
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_every_image_is_pinned_to_a_release(services: dict[str, Any]):
    for name, service in services.items():
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), f"{name}: {service['image']}"


def test_the_images_are_the_versions_that_the_tests_run(services: dict[str, Any]):
    expected = {
        "jaeger": f"jaegertracing/jaeger:{installed.JAEGER.version}",
        "prometheus": f"prom/prometheus:v{installed.PROMETHEUS.version}",
        "collector": f"otel/opentelemetry-collector-contrib:{installed.COLLECTOR.version}",
    }
    assert {name: services[name]["image"] for name in expected} == expected
    assert all(
        service["image"] == expected["collector"]
        for name, service in services.items()
        if name.startswith("gateway")
    )


def test_no_container_may_gain_rights_and_grafana_knows_nobody_without_a_password(services: dict[str, Any]):
    for name, service in services.items():
        assert "no-new-privileges:true" in service["security_opt"], name
    grafana = services["grafana"]["environment"]
    assert grafana["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_every_file_that_compose_mounts_is_there(services: dict[str, Any]):
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]


def test_what_the_configurations_read_from_the_environment_is_addresses_and_the_share():
    read = {name for file in (*COLLECTORS, "jaeger.yaml") for name in stack.references(FILES / file)}
    assert {name for name in read if not ADDRESS.search(name)} == {"KEEP_PERCENT"}


def test_the_tests_set_nothing_but_addresses():
    ports = {f"{kind}_{name}": 1 for kind in ("JAEGER", "COLLECTOR") for name in ("GRPC", "HTTP", "HEALTH")}
    assert all(ADDRESS.search(name) for name in stack.environment({**ports, "PROMETHEUS": 1}))


def test_the_defaults_name_services_of_the_compose_files():
    hosts = set()
    for file in (*COLLECTORS, "jaeger.yaml"):
        for default in stack.references(FILES / file).values():
            found = re.fullmatch(r"(?:http://)?([a-z0-9-]+):\d+(?:/.*)?", default)
            hosts |= {found[1]} if found else set()
    assert hosts <= _project("docker-compose.yaml", "docker-compose.scaled.yaml")["services"].keys()
    assert {"jaeger", "prometheus", "gateway-1", "gateway-2"} <= hosts


def test_prometheus_runs_with_the_options_of_the_compose_file():
    command = _project("docker-compose.yaml")["services"]["prometheus"]["command"]
    chosen = [option for option in command if not re.match(r"--(config|storage)\.", option)]
    assert stack.prometheus_options()[1:] == chosen
    assert chosen == ["--web.enable-otlp-receiver", "--enable-feature=exemplar-storage"]


def test_gateways_sample_by_the_rules_of_the_single_collector():
    def rules(file: str) -> list[str]:
        text = (FILES / file).read_text(encoding="utf-8")
        block = text[text.index("  tail_sampling:\n") : text.index("  batch:\n")]
        return [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]

    assert rules("collector.yaml") == rules("collector-gateway.yaml")


@pytest.mark.parametrize("file", ["collector.yaml", "collector-gateway.yaml"])
def test_the_rule_for_retries_names_the_attribute_that_the_spans_have(file: str):
    """The rule for errors would hide a wrong name here: a retried trace has a failed attempt in it."""
    outcome = f'span.attributes["{semconv.RETRY_OUTCOME}"]'
    condition = f'- {outcome} != nil and {outcome} != "{semconv.FIRST_TRY}"\n'
    assert condition in (FILES / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", COLLECTORS)
def test_the_collector_accepts_the_file(file: str):
    need(installed.COLLECTOR)
    done = subprocess.run(
        [str(installed.COLLECTOR.path()), "validate", f"--config={FILES / file}"],
        check=False,
        capture_output=True,
        text=True,
        env={},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", COLLECTORS)
def test_the_memory_limiter_is_first_in_every_pipeline(file: str):
    chains = re.findall(r"processors: \[([^\]]+)\]", (FILES / file).read_text(encoding="utf-8"))
    assert chains
    assert all(chain.startswith("memory_limiter, ") and chain.endswith("batch") for chain in chains)


def test_promtool_accepts_the_configuration_of_prometheus():
    need(installed.PROMETHEUS)
    done = subprocess.run(
        [str(installed.PROMETHEUS.path("promtool")), "check", "config", str(FILES / "prometheus.yaml")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
