"""SDK and OTLP set up from code, without the distro. Run: python examples/programmatic.py"""

import os
from typing import Any

from pymongo import MongoClient

import otel_retry

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")


def main() -> None:
    otel_retry.setup_otlp(service_name="programmatic-example", query_text_max_length=200)
    with MongoClient[dict[str, Any]](URI) as client:
        client.example_programmatic.c.insert_one({"a": 1})
        budget = otel_retry.budget(client)
        print(f"tokens left: {budget.tokens if budget else 'no bucket'}")


if __name__ == "__main__":
    main()
