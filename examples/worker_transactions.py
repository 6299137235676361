"""A worker that moves money in transactions: the sum never changes, whatever is retried.

Run: opentelemetry-instrument python examples/worker_transactions.py [TRANSFERS]
"""

import os
import random
import sys
from typing import Any

from pymongo import MongoClient
from pymongo.client_session import ClientSession

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")


def main() -> None:
    transfers = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with MongoClient[dict[str, Any]](URI) as client:
        accounts = client.example_worker.accounts
        accounts.drop()
        accounts.insert_many([{"_id": number, "balance": 100} for number in range(10)])

        def transfer(session: ClientSession) -> None:
            source, target = random.sample(range(10), 2)
            accounts.update_one({"_id": source}, {"$inc": {"balance": -1}}, session=session)
            accounts.update_one({"_id": target}, {"$inc": {"balance": 1}}, session=session)

        with client.start_session() as session:
            for _ in range(transfers):
                session.with_transaction(transfer)
        total = sum(account["balance"] for account in accounts.find())
        print(f"{transfers} transfers, sum {total}")


if __name__ == "__main__":
    main()
