"""A change-stream consumer: each event once, in order. Run: opentelemetry-instrument python examples/change_stream.py"""

import os
import threading
from typing import Any

from pymongo import MongoClient

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")
EVENTS = 10


def main() -> None:
    with MongoClient[dict[str, Any]](URI) as client:
        orders = client.example_stream.orders
        orders.drop()
        with orders.watch([{"$match": {"operationType": "insert"}}]) as stream:
            writer = threading.Thread(target=lambda: orders.insert_many([{"_id": n} for n in range(EVENTS)]))
            writer.start()
            seen = [next(stream)["documentKey"]["_id"] for _ in range(EVENTS)]
            writer.join()
        print(f"seen: {seen}")


if __name__ == "__main__":
    main()
