"""The registry of clients: one state per client, for as long as the client lives."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from dataclasses import replace

import pytest

from otel_retry.clients import ClientOptions, ClientRegistry, ClientState
from otel_retry.config import Settings
from otel_retry.policies import (
    BackpressurePolicy,
    CurrentPolicy,
    DriverPolicy,
    OncePolicy,
    PersistentPolicy,
)

OPTIONS = ClientOptions(
    retry_reads=True,
    retry_writes=True,
    retry_writes_explicit=False,
    max_adaptive_retries=2,
    overload_retargeting=False,
    name="app",
    traces_itself=False,
)
DEFAULT = Settings()
OTHER = Settings(policy=CurrentPolicy())


class Client:
    """As PyMongo's: equal to every other one with the same seeds."""

    def __init__(self, options: ClientOptions = OPTIONS) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Client)

    def __hash__(self) -> int:
        return 1


def options_of(client: Client) -> ClientOptions:
    return client.options


def unequipped(client: Client, state: ClientState, options: ClientOptions) -> None:
    """No telemetry here."""


@pytest.fixture
def registry() -> ClientRegistry:
    return ClientRegistry(options_of, unequipped)


def test_without_settings_no_client_has_a_state(registry):
    assert registry.of(Client()) is None
    assert registry.empty
    assert len(registry) == 0


def test_a_client_is_adopted_when_it_is_first_asked_for_and_keeps_its_state(registry):
    client = Client()
    registry.use(DEFAULT)

    state = registry.of(client)

    assert state.settings is DEFAULT
    assert registry.of(client) is state
    assert len(registry) == 1
    assert not registry.empty


def test_a_client_adopted_by_itself_needs_no_default(registry):
    client = Client()

    state = registry.adopt(client, OTHER)

    assert registry.of(client) is state
    assert registry.of(Client()) is None
    assert not registry.empty


def test_equal_clients_have_states_of_their_own(registry):
    one, two = Client(), Client()
    registry.use(DEFAULT)

    assert one == two
    assert hash(one) == hash(two)
    assert registry.of(one) is not registry.of(two)
    assert registry.of(one).budget is not registry.of(two).budget


def test_settings_used_later_hold_for_all_clients_but_those_with_settings_of_their_own(registry):
    early, own, late = Client(), Client(), Client()
    registry.use(DEFAULT)
    state = registry.of(early)
    registry.replace(own, DEFAULT)

    assert registry.use(OTHER) == [(early, state)]

    assert registry.of(early).settings is OTHER
    assert registry.of(late).settings is OTHER
    assert registry.of(own).settings is DEFAULT


def test_a_client_that_is_gone_leaves_nothing(registry):
    registry.use(DEFAULT)
    clients = [Client() for _ in range(100)]
    for client in clients:
        registry.of(client)
    assert len(registry) == 100

    del clients, client
    gc.collect()

    assert len(registry) == 0
    assert not registry._references


def test_a_client_that_takes_the_address_of_a_dead_one_does_not_inherit_its_bucket(registry):
    registry.use(DEFAULT)
    addresses = set()
    for _ in range(100):
        client = Client()
        reused = id(client) in addresses
        addresses.add(id(client))
        budget = registry.of(client).budget
        assert budget.consumed == 0
        budget.try_withdraw()
        del client
        if reused:
            return
    pytest.skip("this interpreter never used an address twice")


def test_the_registry_does_not_keep_a_client_that_is_part_of_a_cycle(registry):
    registry.use(DEFAULT)
    client = Client()
    client.itself = client
    registry.of(client)

    del client
    gc.collect()

    assert len(registry) == 0


def test_replace_gives_new_settings_and_a_full_bucket(registry):
    client = Client()
    registry.use(DEFAULT)
    old = registry.of(client)
    old.budget.try_withdraw()

    assert registry.replace(client, Settings()) is old

    new = registry.of(client)
    assert new is not old
    assert new.budget.tokens == new.budget.capacity
    assert len(registry) == 1


def test_a_replaced_client_is_still_forgotten_when_it_is_gone(registry):
    client = Client()
    registry.adopt(client, DEFAULT)
    registry.replace(client, OTHER)

    del client
    gc.collect()

    assert len(registry) == 0


def test_clear_forgets_clients_and_default(registry):
    client = Client()
    registry.use(DEFAULT)
    registry.of(client)

    registry.clear()

    assert registry.empty
    assert registry.of(client) is None
    del client
    gc.collect()
    assert registry.empty


def test_the_death_of_a_client_that_was_cleared_does_not_take_its_successor(registry):
    """`clear`, then a new instrument(): the old weak reference must not speak for the new entry."""
    client = Client()
    registry.use(DEFAULT)
    registry.of(client)
    registry.clear()
    registry.use(DEFAULT)
    state = registry.of(client)
    gc.collect()

    assert registry.of(client) is state


def at_once(*calls):
    """Run the calls in threads that start together, and give back what they returned."""
    gate = threading.Barrier(len(calls))
    answers = [None] * len(calls)

    def work(number):
        gate.wait(60)
        answers[number] = calls[number]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_two_threads_that_adopt_one_client_get_the_same_bucket():
    """The first is held while it makes its state, so that the second comes meanwhile."""
    inside = threading.Barrier(2)

    def options_when_both_are_here(client):
        with contextlib.suppress(
            threading.BrokenBarrierError
        ):  # the second may be waiting for a lock instead
            inside.wait(0.2)
        return client.options

    registry = ClientRegistry(options_when_both_are_here, unequipped)
    registry.use(DEFAULT)
    client = Client()

    one, two = at_once(lambda: registry.of(client), lambda: registry.of(client))

    assert one is not None
    assert one is two
    assert one.budget is two.budget
    assert len(registry) == 1
    assert len(registry._references) == 1


def test_settings_of_its_own_win_over_an_operation_that_runs_meanwhile(registry, monkeypatch):
    client = Client()
    registry.use(DEFAULT)
    registry.of(client)
    forget = registry._forget
    threads = []

    def forget_and_be_interrupted(key):
        forget(key)
        threads.append(threading.Thread(target=registry.of, args=(client,)))
        threads[-1].start()
        threads[-1].join(0.2)  # it may have to wait until we are done

    monkeypatch.setattr(registry, "_forget", forget_and_be_interrupted)

    registry.replace(client, OTHER)

    for thread in threads:
        thread.join(60)
    assert registry.of(client).settings is OTHER


def test_clients_of_one_name_are_told_apart_by_numbers_that_are_used_again(registry, monkeypatch):
    monkeypatch.setattr("otel_retry.clients._REPORTED_AFTER_DEATH", -1.0)  # forgotten by metrics too
    registry.use(DEFAULT)
    one, two = Client(), Client()
    assert [registry.of(one).name, registry.of(two).name] == ["app-1", "app-2"]

    del one
    gc.collect()
    three = Client()

    assert [registry.of(two).name, registry.of(three).name] == ["app-2", "app-1"]


def test_a_client_that_dies_while_another_is_adopted_does_no_harm():
    """The garbage collector may run at any allocation, and it forgets clients in the midst of whatever runs."""
    dying = [Client()]

    def options_and_a_death(client):
        if client is newcomer:
            dying.clear()
        return client.options

    registry = ClientRegistry(options_and_a_death, unequipped)
    registry.use(DEFAULT)
    newcomer = Client()
    registry.of(dying[0])

    assert registry.of(newcomer).number == 2  # the dead one's number is still in the metrics
    assert len(registry) == 1


def test_ten_thousand_clients_at_once_have_ten_thousand_numbers_which_are_used_again(registry):
    """Adopting one must not take longer the more there are: it took 8 s of CPU when each looked at all others."""
    registry.use(DEFAULT)
    clients = [Client() for _ in range(10_000)]
    assert {registry.of(client).number for client in clients} == set(range(1, 10_001))

    clients.clear()
    gc.collect()
    assert len(registry) == 0
    reported = {state.number for state in registry.reporting()}
    assert len(reported) == 50  # the last of them, so that their last figures are collected

    again = [Client() for _ in range(9_950)]
    assert {registry.of(client).number for client in again} == set(range(1, 10_001)) - reported


def test_an_operation_that_comes_too_late_adopts_nothing():
    """It saw the settings, then somebody switched off: the state would be there for ever, and be listened for."""
    client = Client()
    seen, cleared = threading.Event(), threading.Event()

    class Slow(ClientRegistry):
        """Between the look at the settings and the adoption there is time for everything."""

        @property
        def _default(self):
            if threading.current_thread().name == "late" and not seen.is_set():
                seen.set()
                found = vars(self)["settings"]
                assert cleared.wait(30)
                return found
            return vars(self)["settings"]

        @_default.setter
        def _default(self, settings):
            vars(self)["settings"] = settings

    registry = Slow(options_of, unequipped)
    registry.use(DEFAULT)
    answers = []
    late = threading.Thread(target=lambda: answers.append(registry.of(client)), name="late")
    late.start()
    assert seen.wait(30)
    registry.clear()
    cleared.set()
    late.join(30)

    assert answers == [None]
    assert registry.empty


def test_what_is_equipped_is_the_state_that_is_kept():
    equipped = []
    registry = ClientRegistry(options_of, lambda *seen: equipped.append(seen))
    registry.use(DEFAULT)
    client = Client()

    state = registry.of(client)
    registry.of(client)

    assert equipped == [(client, state, OPTIONS)]
    assert registry.states() == [state]
    assert registry.clients() == [(client, state)]


def test_many_threads_and_many_clients_end_with_one_state_each(registry):
    registry.use(DEFAULT)
    clients = [Client() for _ in range(50)]

    answers = at_once(*[lambda: [registry.of(client) for client in clients]] * 4)

    for states in zip(*answers, strict=True):
        assert len({id(state) for state in states}) == 1
    assert len(registry) == 50


def test_after_a_fork_every_bucket_has_a_fresh_lock(registry):
    registry.use(DEFAULT)
    clients = [Client(), Client()]
    without = Client()
    registry.adopt(without, OTHER)  # no bucket
    for client in clients:
        registry.of(client).budget._lock.acquire()

    registry._after_fork()

    for client in clients:
        assert registry.of(client).budget.try_withdraw()
        assert registry.of(client).budget.consumed == 1


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system cannot fork")
def test_the_fork_hook_is_registered_for_the_child(monkeypatch):
    registered = {}
    monkeypatch.setattr(os, "register_at_fork", registered.update)

    registry = ClientRegistry(options_of, unequipped)

    assert registered == {"after_in_child": registry._after_fork}


def state(policy, **options) -> ClientState:
    return ClientState(settings=Settings(policy=policy), options=replace(OPTIONS, **options), number=1)


@pytest.mark.parametrize(
    ("policy", "decides", "bucket"),
    [
        (BackpressurePolicy(), True, True),
        (OncePolicy(), True, True),
        (PersistentPolicy(), True, True),
        (CurrentPolicy(), True, False),
        (DriverPolicy(), False, False),
    ],
    ids=str,
)
def test_who_decides_and_whether_there_is_a_bucket_depends_on_the_policy(policy, decides, bucket):
    assert state(policy).decides is decides
    assert (state(policy).budget is not None) is bucket


def test_the_current_rules_take_limit_and_retargeting_from_the_client():
    rules = state(CurrentPolicy(), max_adaptive_retries=7, overload_retargeting=True).rules

    assert rules.overload_retries == 7
    assert rules.deprioritises_overloaded
    assert not state(CurrentPolicy()).rules.deprioritises_overloaded


def test_the_seed_s_rules_do_not_depend_on_the_client():
    rules = state(BackpressurePolicy(), max_adaptive_retries=7, overload_retargeting=False).rules

    assert rules.overload_retries == 5
    assert rules.deprioritises_overloaded


@pytest.mark.parametrize(
    ("policy", "asked_for", "explicitly", "retried"),
    [
        (BackpressurePolicy(), True, False, True),
        (BackpressurePolicy(), False, True, False),
        (OncePolicy(), True, False, False),
        (OncePolicy(), True, True, True),
        (OncePolicy(), False, True, False),
    ],
)
def test_the_text_of_2018_wants_retry_writes_to_be_asked_for(policy, asked_for, explicitly, retried):
    assert state(policy, retry_writes=asked_for, retry_writes_explicit=explicitly).retry_writes is retried


def test_jitter_is_a_number_between_nought_and_one_and_varies():
    jitter = state(BackpressurePolicy()).jitter
    drawn = [jitter() for _ in range(100)]

    assert all(0 <= number < 1 for number in drawn)
    assert len(set(drawn)) > 50


def test_a_client_that_is_gone_is_reported_for_a_while_and_its_number_is_kept(registry):
    registry.use(DEFAULT)
    client = Client()
    state = registry.of(client)
    del client
    gc.collect()
    assert len(registry) == 0
    assert registry.reporting() == [state]
    other = Client()
    assert registry.of(other).number != state.number
    registry.clear()
    assert registry.reporting() == []
