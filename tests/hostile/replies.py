"""What a server might answer if it were out of its mind: of any BSON type, of any size, with known words in wrong places."""

from __future__ import annotations

import datetime as dt
import math

import bson
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from hypothesis import strategies as st

MEGABYTE = "x" * 1_000_000

LABELS = (
    "RetryableWriteError",
    "RetryableError",
    "SystemOverloadedError",
    "NoWritesPerformed",
    "TransientTransactionError",
)
CODES = (462, 91, 10107, 11600, 11602, 13436, 189, 6, 9001, 50, 64, 100, 112, 262, 11000, 20, 13, 43, 2)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=20),
    st.sampled_from(
        [
            "",
            "462",
            MEGABYTE,
            b"\xff" * 1000,
            Int64(2**62),
            Decimal128("NaN"),
            Decimal128("1E6000"),
            ObjectId(b"o" * 12),
            dt.datetime(1, 1, 1, tzinfo=dt.UTC),
            Regex("(", "i"),
            Code("while(1);", {"a": 1}),
            Timestamp(2**32 - 1, 2**32 - 1),
            Binary(b"x" * 16, 4),
            DBRef("c", 1),
            MinKey(),
            MaxKey(),
        ]
    ),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["code", "errmsg", "errInfo", "id", "index", "a"]), inner, max_size=3
        ),
    ),
    max_leaves=5,
)

labels = st.one_of(
    st.lists(st.sampled_from(LABELS), max_size=4),
    st.lists(st.one_of(st.sampled_from(LABELS), scalars), max_size=4),
    st.sampled_from(LABELS),
    st.dictionaries(st.sampled_from(LABELS), scalars, max_size=2),
    anything,
)
codes = st.one_of(
    st.sampled_from(CODES),
    st.sampled_from(CODES).map(float),
    st.sampled_from(CODES).map(str),
    st.sampled_from(CODES).map(lambda code: code + 2**32),
    anything,
)
backoffs = st.one_of(
    st.sampled_from(
        [
            0,
            -1,
            -(2**63),
            2**63 - 1,
            365 * 86_400_000,
            0.0,
            5e-324,
            1e308,
            math.nan,
            math.inf,
            -math.inf,
            "100",
            True,
        ]
    ),
    st.integers(1, 1000),
    anything,
)
statement_errors = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "index": st.one_of(st.integers(0, 3), anything),
                "code": codes,
                "errmsg": anything,
                "errInfo": anything,
                "writeErrors": anything,
                "errorLabels": labels,
            },
        ),
        max_size=3,
    ),
    anything,
)
write_concern_errors = st.one_of(
    st.fixed_dictionaries(
        {}, optional={"code": codes, "errmsg": anything, "errInfo": anything, "errorLabels": labels}
    ),
    anything,
)
cursors = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "id": anything,
            "ns": st.one_of(st.just("db.things"), anything),
            "firstBatch": st.one_of(st.just([]), anything),
            "nextBatch": st.one_of(st.just([]), anything),
        },
    ),
    anything,
)
replies = st.fixed_dictionaries(
    {"ok": st.one_of(st.sampled_from([0, 0, 0, 1, 1.0]), scalars)},
    optional={
        "code": codes,
        "codeName": st.one_of(st.just("IngressRequestRateLimitExceeded"), anything),
        "errmsg": anything,
        "errorLabels": labels,
        "baseBackoffMS": backoffs,
        "errInfo": anything,
        "keyPattern": anything,
        "keyValue": anything,
        "writeErrors": statement_errors,
        "writeConcernError": write_concern_errors,
        "cursor": cursors,
        "n": anything,
        "nModified": anything,
        "value": anything,
        "values": anything,
        "lastErrorObject": anything,
        "upserted": anything,
        "nErrors": anything,
        "operationTime": anything,
    },
)
overloads = st.fixed_dictionaries(
    {
        "ok": st.just(0),
        "code": st.one_of(st.just(462), codes),
        "errorLabels": st.lists(scalars, max_size=2).map(
            lambda more: ["SystemOverloadedError", "RetryableError", *map(repr, more)]
        ),
        "baseBackoffMS": backoffs,
    },
    optional={"errmsg": anything, "codeName": anything, "writeErrors": statement_errors},
)


def _mangled(reply: dict[str, object], position: int, byte: int) -> bytes:
    data = bytearray(bson.encode(reply))
    data[position % len(data)] = byte
    return bytes(data)


bytes_of_replies = st.one_of(
    st.binary(max_size=60),
    st.builds(
        _mangled,
        st.just(
            {
                "ok": 0,
                "code": 462,
                "errmsg": "something that is text",
                "errorLabels": ["RetryableError", "SystemOverloadedError"],
            }
        ),
        st.integers(4, 200),
        st.sampled_from([0, 1, 0x7F, 0xFE, 0xFF]),
    ),
)
"""Not even BSON, or BSON with one byte that is wrong: text that is no UTF-8, a length that lies."""
