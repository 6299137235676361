"""Two clients, two policies: a patient one for the nightly job, PyMongo's own loop for the rest.

Run: python examples/two_policies.py
"""

import os
from typing import Any

from pymongo import MongoClient

import otel_retry

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")


def main() -> None:
    otel_retry.instrument(policy="driver")
    with (
        MongoClient[dict[str, Any]](URI) as web,
        MongoClient[dict[str, Any]](URI, timeoutMS=60_000) as nightly,
    ):
        patient = otel_retry.IdempotenceAware(otel_retry.PersistentPolicy())
        otel_retry.instrument_client(nightly, policy=patient)
        web.example_policies.c.insert_one({"from": "web"})
        nightly.example_policies.c.update_many({}, {"$set": {"counted": True}})
        bucket = otel_retry.budget(nightly)
        print(f"web has a bucket: {otel_retry.budget(web) is not None}; nightly: {bucket is not None}")


if __name__ == "__main__":
    main()
