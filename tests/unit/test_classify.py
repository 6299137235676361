"""Exceptions turned into facts: a table of what PyMongo raises, and replies that no honest server sends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ClientBulkWriteException,
    ConfigurationError,
    ConnectionFailure,
    CursorNotFound,
    DuplicateKeyError,
    ExecutionTimeout,
    InvalidOperation,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
    WriteError,
    WTimeoutError,
)

from otel_retry.events import Failure, Kind, Phase
from otel_retry.pymongo.classify import LABELS, classify

RETRYABLE, WRITE, OVERLOADED, NOTHING_WRITTEN = (
    "RetryableError",
    "RetryableWriteError",
    "SystemOverloadedError",
    "NoWritesPerformed",
)


# A busy machine is slow, and that is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def server_error(
    code: Any, cls: type[OperationFailure] = OperationFailure, **details: Any
) -> OperationFailure:
    return cls("failed", code, {"ok": 0, "code": code, "errmsg": "failed", **details})


def bulk_error(
    *, write_concern_codes: tuple[Any, ...] = (), write_codes: tuple[Any, ...] = (), **details: Any
):
    return BulkWriteError(
        {
            "writeErrors": [{"index": 0, "code": code, "errmsg": "x"} for code in write_codes],
            "writeConcernErrors": [{"code": code, "errmsg": "x"} for code in write_concern_codes],
            "nInserted": 0,
            **details,
        }
    )


def labelled(error: PyMongoError, *labels: str) -> PyMongoError:
    for label in labels:
        error._add_error_label(label)
    return error


TABLE = [
    # error, phase, kind, code
    (ServerSelectionTimeoutError("none"), Phase.SELECTION, Kind.NO_SERVER, None),
    (WaitQueueTimeoutError("full"), Phase.CONNECTION, Kind.POOL_EXHAUSTED, None),
    (AutoReconnect("h:1: connection pool paused"), Phase.CONNECTION, Kind.POOL_CLEARED, None),
    # The same words in an answer to a command that was sent are not about our pool.
    (AutoReconnect("h:1: connection pool paused"), Phase.SENT, Kind.NETWORK, None),
    (AutoReconnect("connection closed"), Phase.SENT, Kind.NETWORK, None),
    (AutoReconnect("connection refused"), Phase.CONNECTION, Kind.NETWORK, None),
    (ConnectionFailure("lost"), Phase.SENT, Kind.NETWORK, None),
    (NetworkTimeout("timed out"), Phase.SENT, Kind.NETWORK_TIMEOUT, None),
    (NetworkTimeout("timed out"), Phase.CONNECTION, Kind.NETWORK_TIMEOUT, None),
    (NotPrimaryError("not primary", {"ok": 0, "code": 10107}), Phase.SENT, Kind.NOT_PRIMARY, 10107),
    (NotPrimaryError("not primary"), Phase.SENT, Kind.NOT_PRIMARY, None),
    *[
        (server_error(code), Phase.SENT, Kind.NOT_PRIMARY, code)
        for code in (10058, 10107, 13435, 13436, 189, 11600, 11602, 91)
    ],
    *[(server_error(code), Phase.SENT, Kind.SERVER_TIMEOUT, code) for code in (50, 64, 89, 262)],
    (server_error(50, ExecutionTimeout), Phase.SENT, Kind.SERVER_TIMEOUT, 50),
    (server_error(None, ExecutionTimeout), Phase.SENT, Kind.SERVER_TIMEOUT, None),
    (server_error(100, WTimeoutError), Phase.SENT, Kind.SERVER_TIMEOUT, 100),
    *[
        (server_error(code), Phase.SENT, Kind.REJECTED, code)
        for code in (2, 9, 13, 14, 18, 20, 26, 27, 48, 59, 72, 73, 85, 86, 121, 11000)
    ],
    (server_error(11000, DuplicateKeyError), Phase.SENT, Kind.REJECTED, 11000),
    (server_error(12582, DuplicateKeyError), Phase.SENT, Kind.REJECTED, 12582),
    *[
        (server_error(code), Phase.SENT, Kind.SERVER_ERROR, code)
        for code in (1, 6, 7, 112, 134, 251, 462, 9001)
    ],
    (server_error(43, CursorNotFound), Phase.SENT, Kind.SERVER_ERROR, 43),
    (server_error(100, WriteConcernError), Phase.SENT, Kind.SERVER_ERROR, 100),
    (server_error(17280, WriteError), Phase.SENT, Kind.SERVER_ERROR, 17280),
    (server_error(None), Phase.SENT, Kind.SERVER_ERROR, None),
    # PyMongo gives a bulk write's error the code 65; what its write concern met is what tells.
    (bulk_error(), Phase.SENT, Kind.SERVER_ERROR, 65),
    (bulk_error(write_codes=(11000,)), Phase.SENT, Kind.SERVER_ERROR, 65),
    (bulk_error(write_concern_codes=(91,)), Phase.SENT, Kind.NOT_PRIMARY, 65),
    (bulk_error(write_concern_codes=(91, 64)), Phase.SENT, Kind.SERVER_TIMEOUT, 65),
    (InvalidOperation("closed"), Phase.SENT, Kind.CLIENT_ERROR, None),
    (ConfigurationError("wrong"), Phase.SENT, Kind.CLIENT_ERROR, None),
    (PyMongoError("?"), Phase.SENT, Kind.CLIENT_ERROR, None),
    (ValueError("the application's own"), Phase.SENT, Kind.CLIENT_ERROR, None),
    (KeyboardInterrupt(), Phase.SENT, Kind.CLIENT_ERROR, None),
]


def described(case: Any) -> str | None:
    if isinstance(case, BaseException):
        return f"{type(case).__name__}-{getattr(case, 'code', None)}"
    return case.value if isinstance(case, (Phase, Kind)) else None


@pytest.mark.parametrize(("error", "phase", "kind", "code"), TABLE, ids=described)
def test_an_error_is_of_one_kind_and_keeps_its_code(error, phase, kind, code):
    failure = classify(error, phase=phase, server="h:1")

    assert (failure.kind, failure.code) == (kind, code)
    assert failure.error is error
    assert (failure.phase, failure.server) == (phase, "h:1")
    assert failure.labels == frozenset()
    assert failure.base_backoff is None


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(
    "make",
    [
        lambda label: server_error(1, errorLabels=[label, "Unknown"]),
        lambda label: AutoReconnect("lost", {"errorLabels": [label, "Unknown"]}),
        lambda label: labelled(ServerSelectionTimeoutError("none"), label, "Unknown"),
        lambda label: bulk_error(errorLabels=[label, "Unknown"]),
    ],
    ids=["of the server", "of the network", "put there by PyMongo", "of a bulk write"],
)
def test_a_known_label_is_kept_and_an_unknown_one_is_not(label, make):
    assert classify(make(label)).labels == {label}


def test_all_labels_of_a_reply_are_kept_together():
    assert classify(server_error(462, errorLabels=[*LABELS])).labels == set(LABELS)


@pytest.mark.parametrize("label", [RETRYABLE, WRITE])
def test_the_server_s_own_label_outweighs_what_its_code_usually_means(label):
    assert classify(server_error(20)).kind is Kind.REJECTED
    assert classify(server_error(20, errorLabels=[label])).kind is Kind.SERVER_ERROR


@pytest.mark.parametrize("label", [OVERLOADED, NOTHING_WRITTEN])
def test_a_label_that_does_not_speak_of_retries_leaves_a_rejection_as_it_is(label):
    assert classify(server_error(20, errorLabels=[label])).kind is Kind.REJECTED


def test_the_error_inside_a_client_bulk_write_gives_the_facts_and_the_outer_one_is_raised():
    inner = server_error(91, errorLabels=[WRITE], baseBackoffMS=250)
    outer = ClientBulkWriteException({"error": inner, "errorLabels": [RETRYABLE]}, verbose=False)

    failure = classify(outer)

    assert failure.error is outer
    assert (failure.kind, failure.code) == (Kind.NOT_PRIMARY, 91)
    assert failure.labels == {WRITE, RETRYABLE}
    assert failure.base_backoff == 0.25


def test_a_network_error_inside_a_client_bulk_write_is_a_network_error():
    outer = ClientBulkWriteException({"error": NetworkTimeout("timed out")}, verbose=False)

    assert classify(outer).kind is Kind.NETWORK_TIMEOUT


@pytest.mark.parametrize("inner", [None, "text", ValueError("not PyMongo's"), {"code": 91}])
def test_a_client_bulk_write_without_an_error_of_pymongo_s_inside_speaks_for_itself(inner):
    failure = classify(ClientBulkWriteException({"error": inner}, verbose=False))

    assert (failure.kind, failure.code) == (Kind.SERVER_ERROR, 65)


@pytest.mark.parametrize(
    ("hint", "seconds"),
    [
        (100, 0.1),
        (1, 0.001),
        (0.5, 0.0005),
        (3_600_000, 3600.0),
        (365 * 24 * 3_600_000, 3600.0),  # a year is cut to an hour
        (2**63 - 1, 3600.0),
        (1e308, 3600.0),
        (0, None),
        (0.0, None),
        (-1, None),
        (-0.5, None),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        ("100", None),
        (b"100", None),
        (True, None),
        (None, None),
        ([100], None),
        ({"ms": 100}, None),
    ],
)
def test_the_server_s_backoff_hint_is_seconds_or_nothing(hint, seconds):
    assert classify(server_error(462, baseBackoffMS=hint)).base_backoff == seconds


@pytest.mark.parametrize(
    ("code", "known"),
    [
        (91, 91),
        (91.0, 91),
        (-1, -1),
        (2**31 - 1, 2**31 - 1),
        (2**31, None),
        (2**63, None),
        (-(2**31) - 1, None),
        (91.5, None),
        (math.nan, None),
        (math.inf, None),
        (1e300, None),
        ("91", None),
        (b"91", None),
        (True, None),
        (False, None),
        ([91], None),
        ({"code": 91}, None),
    ],
)
def test_a_code_that_is_no_32_bit_integer_counts_as_absent(code, known):
    assert classify(server_error(code)).code == known


def test_the_code_of_an_error_that_has_only_details_is_read_from_there():
    assert classify(AutoReconnect("lost", {"code": 91})).code == 91
    assert classify(AutoReconnect("lost", [91])).code is None


HOSTILE_NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    # As wide as BSON can carry; what it cannot carry has a test of its own below.
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([2**31, -(2**31) - 1, 2**63 - 1]),
    st.floats(allow_subnormal=False),
    st.sampled_from([1e308, math.nan, math.inf]),
    st.decimals(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.just({}),
)
HOSTILE_LABELS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=20),
    st.sampled_from(LABELS),
    st.binary(max_size=20),
    st.lists(st.one_of(st.sampled_from(LABELS), st.text(max_size=5), st.none(), st.integers()), max_size=6),
    st.dictionaries(st.sampled_from(LABELS), st.integers(), max_size=3),
    st.just([["RetryableError"]]),
    st.just([{"RetryableError": 1}]),
)
HOSTILE_MESSAGES = st.one_of(
    st.none(),
    st.text(max_size=10),
    st.binary(max_size=10),
    st.sampled_from(["m" * 2**20, b"\xff" * 2**20, "connection pool paused", "\ud800"]),
    st.integers(),
)
HOSTILE_LISTS = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.just({"code": 91}),
    st.lists(
        st.one_of(
            st.none(),
            st.text(max_size=3),
            st.just([]),
            st.fixed_dictionaries({}, optional={"code": HOSTILE_NUMBERS}),
        ),
        max_size=3,
    ),
)
HOSTILE_DETAILS = st.one_of(
    st.none(),
    st.lists(st.integers(), max_size=2),
    st.text(max_size=5),
    st.integers(),
    st.fixed_dictionaries(
        {},
        optional={
            "ok": HOSTILE_NUMBERS,
            "code": HOSTILE_NUMBERS,
            "errmsg": HOSTILE_MESSAGES,
            "errorLabels": HOSTILE_LABELS,
            "baseBackoffMS": HOSTILE_NUMBERS,
            "writeErrors": HOSTILE_LISTS,
            "writeConcernErrors": HOSTILE_LISTS,
            "error": st.one_of(
                HOSTILE_NUMBERS,
                st.builds(AutoReconnect, st.just("lost")),
                st.builds(lambda code: OperationFailure("inside", code), HOSTILE_NUMBERS),
            ),
        },
    ),
)


class RawError(OperationFailure):
    """PyMongo may change how it keeps what the server sent; this and the next two keep it as it came."""

    def __init__(self, code: Any, details: Any) -> None:
        super().__init__("raw")
        self._raw = code, details

    @property
    def code(self) -> Any:
        return self._raw[0]

    @property
    def details(self) -> Any:
        return self._raw[1]


class RawBulkError(BulkWriteError):
    def __init__(self, code: Any, details: Any) -> None:
        super().__init__({})
        self._raw = details

    @property
    def details(self) -> Any:
        return self._raw


class RawNetworkError(AutoReconnect):
    def __init__(self, code: Any, details: Any) -> None:
        super().__init__("raw")
        self.errors = self.details = details
        self.code = code


def sane(failure: Failure) -> bool:
    return (
        isinstance(failure.kind, Kind)
        and (failure.code is None or (type(failure.code) is int and -(2**31) <= failure.code < 2**31))
        and failure.labels <= set(LABELS)
        and (failure.base_backoff is None or 0 < failure.base_backoff <= 3600)
    )


@patient
@given(
    make=st.sampled_from([RawError, RawBulkError, RawNetworkError]),
    code=HOSTILE_NUMBERS,
    details=HOSTILE_DETAILS,
    phase=st.sampled_from(Phase),
)
@example(make=RawBulkError, code=None, details={"writeConcernErrors": [{"code": [91]}]}, phase=Phase.SENT)
def test_whatever_a_server_sends_the_facts_are_sane(make, code, details, phase):
    error = make(code, details)

    failure = classify(error, phase=phase)

    assert sane(failure), failure
    assert failure.error is error


@patient
@given(code=HOSTILE_NUMBERS, details=HOSTILE_DETAILS)
def test_whatever_pymongo_makes_of_a_hostile_reply_the_facts_are_sane(code, details):
    for make in (
        lambda: OperationFailure("failed", code, details),
        lambda: WriteError("failed", code, details),
        lambda: NotPrimaryError("failed", details),
        lambda: AutoReconnect("failed", details),
        lambda: BulkWriteError(details),
        lambda: ClientBulkWriteException(details, verbose=True),
    ):
        try:
            error = make()
        except (TypeError, AttributeError):
            continue  # PyMongo itself refuses to build it: then it never reaches us
        failure = classify(error)
        assert sane(failure), failure


@pytest.mark.parametrize("hint", [5e-324, 1e-322])
def test_a_hint_too_small_to_be_divided_counts_as_absent(hint):
    assert sane(classify(server_error(462, baseBackoffMS=hint)))


@pytest.mark.parametrize("hint", [10**400, -(10**400)], ids=["1e400", "-1e400"])
def test_an_integer_beyond_any_double_does_not_raise(hint):
    assert sane(classify(server_error(462, baseBackoffMS=hint)))
