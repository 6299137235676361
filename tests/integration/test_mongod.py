"""The processes that the other tests stand on: they start, they obey, and nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure

from otel_retry import mongod

ROOT = Path(__file__).parents[2]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def eventually(condition, *, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mongod.BINARY_VARIABLE, str(path))


@pytest.fixture
def no_mongod(monkeypatch, tmp_path):
    """Neither variable, nor wheel, nor PATH has one."""
    monkeypatch.delenv(mongod.BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Where the temporary folders of this test are made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


class TestLife:
    def test_stop_leaves_no_process_and_no_folder(self, folders, capfd):
        with mongod.start() as deployment:
            pids = [node.pid for node in deployment.nodes]
            assert [folder.name for folder in folders.iterdir()] == [deployment.directory.name]
            assert all(map(exists, pids))
            with MongoClient(deployment.uri) as client:
                client.test.things.insert_one({"retryable": True})
        assert not any(map(exists, pids))
        assert not deployment.nodes[0].alive
        assert list(folders.iterdir()) == []
        deployment.stop()
        assert capfd.readouterr() == ("", "")
        with pytest.raises(mongod.MongodError, match="stopped"):
            deployment.nodes[0].restart()

    def test_an_unused_deployment_stops_when_it_is_garbage(self, folders):
        deployment = mongod.start(standalone=True)
        pid = deployment.nodes[0].pid
        del deployment
        assert eventually(lambda: not exists(pid) and not list(folders.iterdir()))

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    def test_nothing_is_left_when_the_caller_is_killed(self, folders, number):
        # A forked child that lives on holds a copy of every descriptor: it must not keep the processes alive.
        script = (
            "import json, os, sys, time\n"
            "from otel_retry import mongod\n"
            "d = mongod.start()\n"
            "there, told = os.pipe()\n"
            "child = os.fork()\n"
            "if not child: os.write(told, b'!'); time.sleep(120)\n"
            "os.read(there, 1)\n"  # a Ctrl-C in the very moment of the fork is another story
            "print(json.dumps([d.nodes[0].pid, child]), flush=True)\n"
            "time.sleep(120)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Its own group, so that the signal can be sent as a terminal sends Ctrl-C: to the whole group.
            start_new_session=True,
        ) as caller:
            pid, child = json.loads(caller.stdout.readline())
            try:
                assert exists(pid)
                assert list(folders.iterdir())
                if number == signal.SIGINT:
                    os.killpg(caller.pid, number)
                else:
                    os.kill(caller.pid, number)
                    assert exists(child)
                assert eventually(lambda: not exists(pid))
                assert eventually(lambda: not list(folders.iterdir()))
            finally:
                os.killpg(caller.pid, signal.SIGKILL)

    def test_a_standalone_is_no_replica_set(self):
        with mongod.start(standalone=True, parameters={"ttlMonitorEnabled": False}) as deployment:
            assert deployment.replica_set is None
            assert "setName" not in deployment.nodes[0].command({"hello": 1})
            assert deployment.primary() is deployment.nodes[0]
            reply = deployment.nodes[0].command({"getParameter": 1, "ttlMonitorEnabled": 1})
            assert reply["ttlMonitorEnabled"] is False

    def test_a_port_that_is_taken_is_replaced(self, monkeypatch):
        free_ports = mongod._free_ports
        with socket.create_server(("127.0.0.1", 0)) as squatter:
            taken = squatter.getsockname()[1]
            choices = iter([[taken], free_ports(1)])
            monkeypatch.setattr(mongod, "_free_ports", lambda count: next(choices))
            with mongod.start() as deployment:
                assert deployment.nodes[0].port != taken
        assert next(choices, None) is None

    def test_a_failed_start_shows_the_log(self, folders):
        with pytest.raises(mongod.MongodError, match="noSuchParameter") as caught:
            mongod.start(parameters={"noSuchParameter": 1})
        assert not isinstance(caught.value, mongod.MongodUnavailable)
        assert list(folders.iterdir()) == []

    def test_a_start_that_takes_too_long_is_given_up(self, folders, monkeypatch, tmp_path):
        only(
            executable(tmp_path.parent / f"{tmp_path.name}-slow", "echo still thinking; exec sleep 60"),
            monkeypatch,
        )
        with pytest.raises(mongod.MongodError, match="still thinking"):
            mongod.start(timeout=0.5)
        assert list(folders.iterdir()) == []

    def test_impossible_numbers_are_refused(self):
        with pytest.raises(ValueError, match="not 0"):
            mongod.start(0)
        with pytest.raises(ValueError, match="standalone"):
            mongod.start(2, standalone=True)


class TestNodes:
    def test_three_nodes_elect_and_a_killed_primary_is_succeeded(self, three_nodes, database_name):
        assert len(three_nodes.nodes) == 3
        first = three_nodes.primary()
        assert len(three_nodes.secondaries()) == 2
        first.kill()
        assert not first.alive
        second = three_nodes.primary()
        assert second is not first
        with MongoClient(three_nodes.uri, heartbeatFrequencyMS=500) as client:
            client[database_name].things.insert_one({"_id": 1}, comment="needs two of three")
        first.restart()
        three_nodes.wait_ready()
        assert first.alive

    def test_a_suspended_primary_is_succeeded_and_comes_back_as_a_secondary(self, three_nodes):
        first = three_nodes.primary()
        first.suspend()
        assert first.alive
        assert three_nodes.primary() is not first
        first.resume()
        three_nodes.wait_ready()
        assert first in three_nodes.secondaries()

    def test_step_down_elects_another(self, three_nodes):
        first = three_nodes.primary()
        three_nodes.step_down(10)
        assert three_nodes.primary() is not first

    def test_heal_undoes_everything(self, three_nodes):
        three_nodes.fail_command("all", commands=["ping"], errorCode=91)
        one, two, _ = three_nodes.nodes
        one.kill()
        two.suspend()
        three_nodes.heal()
        assert all(node.alive and not node.suspended for node in three_nodes.nodes)
        assert all(node.command({"ping": 1})["ok"] for node in three_nodes.nodes)

    def test_heal_ends_a_long_step_down_of_a_single_node(self, deployment):
        if not deployment.nodes:
            pytest.skip("not to be done to somebody else's deployment")
        deployment.step_down(60)
        deployment.heal(timeout=60.0)
        assert deployment.primary() is deployment.nodes[0]


class TestFailCommand:
    def test_it_fails_as_many_times_as_asked(self, deployment, database_name):
        with MongoClient(deployment.uri, retryReads=False) as client:
            things = client[database_name].things
            deployment.fail_command(commands=["find"], times=2, errorCode=8, errorLabels=["Special"])
            for _ in range(2):
                with pytest.raises(OperationFailure) as caught:
                    things.find_one()
                assert caught.value.code == 8
                assert caught.value.has_error_label("Special")
            assert things.find_one() is None

    def test_it_is_on_inside_a_with_block_only(self, deployment, database_name):
        with MongoClient(deployment.uri, retryReads=False) as client:
            things = client[database_name].things
            with deployment.fail_command(commands=["find"], closeConnection=True):
                for _ in range(3):
                    with pytest.raises(AutoReconnect):
                        things.find_one()
            assert things.find_one() is None

    def test_clear_failpoints_ends_it(self, deployment, database_name):
        with MongoClient(deployment.uri, retryReads=False) as client:
            deployment.fail_command(commands=["find"], times="alwaysOn", errorCode=8)
            deployment.clear_failpoints()
            assert client[database_name].things.find_one() is None

    def test_it_spares_other_applications(self, deployment, database_name):
        deployment.fail_command(commands=["find"], errorCode=8, appName="victim")
        with MongoClient(deployment.uri, retryReads=False, appname="victim") as client:
            with pytest.raises(OperationFailure):
                client[database_name].things.find_one()
        with MongoClient(deployment.uri, retryReads=False) as client:
            assert client[database_name].things.find_one() is None

    def test_a_probability_of_one_half_fails_some(self, deployment, database_name):
        failed = 0
        with MongoClient(deployment.uri, retryReads=False) as client:
            with deployment.fail_command(commands=["find"], probability=0.5, errorCode=8):
                for _ in range(100):
                    try:
                        client[database_name].things.find_one()
                    except OperationFailure:
                        failed += 1
        assert 20 < failed < 80

    def test_it_hits_the_chosen_node(self, three_nodes):
        one, two = three_nodes.secondaries()
        with three_nodes.fail_command(one, commands=["ping"], errorCode=8):
            with pytest.raises(mongod.MongodError, match="ping failed"):
                one.command({"ping": 1})
            assert two.command({"ping": 1})["ok"]

    def test_arguments_that_would_lock_the_door_are_refused(self, deployment):
        with pytest.raises(ValueError, match="appName"):
            deployment.fail_command(commands=["hello"], closeConnection=True)
        with pytest.raises(TypeError, match="list"):
            deployment.fail_command(commands="find", errorCode=8)


class TestFindingOne:
    def test_the_variable_comes_first(self, no_mongod, monkeypatch):
        named = executable(no_mongod / "named", "exit 1")
        executable(no_mongod / "mongod", "exit 1")
        only(named, monkeypatch)
        assert mongod.find_binary() == named

    def test_the_wheel_comes_before_the_path(self, no_mongod):
        on_path = executable(no_mongod / "mongod", "exit 1")
        assert mongod.find_binary() == on_path
        folder = no_mongod / "fiftyone" / "db" / "bin"
        folder.mkdir(parents=True)
        in_wheel = executable(folder / "mongod", "exit 1")
        assert mongod.find_binary() == in_wheel

    @pytest.mark.usefixtures("no_mongod")
    def test_a_missing_binary_says_how_to_get_one(self):
        with pytest.raises(mongod.MongodUnavailable) as caught:
            mongod.start()
        for hint in ("pip install 'otel-retry[mongod]'", "OTEL_RETRY_MONGOD", "MONGODB_URI"):
            assert hint in str(caught.value)

    def test_a_missing_library_is_named_with_its_package(self, monkeypatch, tmp_path):
        loader = "mongod: error while loading shared libraries: libcurl.so.4: cannot open shared object file: No such file or directory"
        only(executable(tmp_path / "mongod", f"echo '{loader}' >&2; exit 127"), monkeypatch)
        with pytest.raises(mongod.MongodUnavailable) as caught:
            mongod.start()
        for hint in (
            "libcurl.so.4",
            "apt-get install libcurl4 libssl3",
            "pip install 'otel-retry[mongod]'",
            "MONGODB_URI",
        ):
            assert hint in str(caught.value)

    def test_a_system_too_old_for_the_binary_is_said_to_be_so(self, monkeypatch, tmp_path):
        loader = "mongod: /lib/libc.so.6: version \\`GLIBC_2.34' not found (required by mongod)"
        only(executable(tmp_path / "mongod", f'echo "{loader}" >&2; exit 1'), monkeypatch)
        with pytest.raises(mongod.MongodUnavailable, match=r"GLIBC_2\.34"):
            mongod.start()

    def test_a_file_that_is_no_program_is_unavailable(self, monkeypatch, tmp_path):
        path = tmp_path / "mongod"
        path.write_bytes(b"\x7fELF but not really")
        path.chmod(0o755)
        only(path, monkeypatch)
        with pytest.raises(mongod.MongodUnavailable, match="Exec format error"):
            mongod.start()

    def test_a_variable_that_names_no_file_is_an_error(self, monkeypatch, tmp_path):
        only(tmp_path / "nowhere", monkeypatch)
        with pytest.raises(
            mongod.MongodUnavailable, match=r"OTEL_RETRY_MONGOD='.*/nowhere': there is no such file\. Set"
        ):
            mongod.start()

    def test_a_variable_that_names_no_executable_is_an_error(self, monkeypatch, tmp_path):
        path = tmp_path / "text"
        path.write_text("no program")
        only(path, monkeypatch)
        with pytest.raises(
            mongod.MongodUnavailable, match=r"OTEL_RETRY_MONGOD='.*/text': that file is not executable\. Set"
        ):
            mongod.start()


class TestExternal:
    def test_the_variable_is_used_and_nothing_is_stopped(self, deployment, database_name, monkeypatch):
        monkeypatch.setenv(mongod.URI_VARIABLE, deployment.uri)
        with mongod.deployment() as external:
            assert external.uri == deployment.uri
            assert external.replica_set == deployment.replica_set
            assert external.nodes == ()
            assert external.directory is None
            with pytest.raises(mongod.MongodError, match="external"):
                external.primary()
            with MongoClient(external.uri, retryReads=False) as client:
                external.fail_command(commands=["find"], errorCode=8)
                with pytest.raises(OperationFailure):
                    client[database_name].things.find_one()
                external.heal()
                assert client[database_name].things.find_one() is None
        with MongoClient(deployment.uri) as client:
            assert client.admin.command("ping")["ok"]

    def test_start_ignores_the_variable(self, monkeypatch):
        monkeypatch.setenv(mongod.URI_VARIABLE, "mongodb://127.0.0.1:1")
        with mongod.start(standalone=True) as deployment:
            assert len(deployment.nodes) == 1

    def test_one_that_does_not_answer_is_named_without_its_password(self, monkeypatch):
        monkeypatch.setenv(mongod.URI_VARIABLE, "mongodb://me:secret@127.0.0.1:1/")
        with pytest.raises(
            mongod.MongodUnavailable, match=r"MONGODB_URI='mongodb://\*\*\*@127\.0\.0\.1:1/'"
        ) as caught:
            mongod.deployment(timeout=0.5)
        assert "secret" not in str(caught.value)
