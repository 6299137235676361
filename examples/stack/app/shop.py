"""A small shop that takes orders without end: plain PyMongo, no word of OpenTelemetry or of retries.

`SHOP_ORDERS_PER_SECOND` is how busy it is (20); `SHOP_ORDERS` ends it after so many (0: never).
"""

from __future__ import annotations

import logging
import os
import random
import time
from datetime import UTC, datetime

from pymongo import MongoClient, ReturnDocument
from pymongo.errors import PyMongoError

log = logging.getLogger("shop")

ARTICLES = ("apples", "bread", "cheese", "dates", "eggs", "figs")


class Shop:
    """Articles in stock, orders, and a report; each method is what one request of a customer would do."""

    def __init__(self, client: MongoClient) -> None:
        self._database = client["shop"]

    def stock_up(self) -> None:
        for article in ARTICLES:
            self._database["articles"].update_one(
                {"_id": article}, {"$setOnInsert": {"stock": 1_000_000}}, upsert=True
            )

    def order(self, article: str) -> None:
        taken = self._database["articles"].find_one_and_update(
            {"_id": article, "stock": {"$gt": 0}},
            {"$inc": {"stock": -1}},
            return_document=ReturnDocument.AFTER,
        )
        if taken is not None:
            self._database["orders"].insert_one({"article": article, "at": datetime.now(UTC)})

    def look(self, article: str) -> None:
        self._database["articles"].find_one({"_id": article})

    def report(self) -> None:
        list(self._database["orders"].aggregate([{"$group": {"_id": "$article", "sold": {"$sum": 1}}}]))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    per_second = float(os.environ.get("SHOP_ORDERS_PER_SECOND", "20"))
    orders = int(os.environ.get("SHOP_ORDERS", "0"))
    with MongoClient(os.environ["MONGODB_URI"]) as client:
        shop = Shop(client)
        shop.stock_up()
        log.info("open: %g orders per second", per_second)
        taken = 0
        while not orders or taken < orders:
            taken += 1
            article = random.choice(ARTICLES)
            try:
                shop.look(article)
                shop.order(article)
                if taken % 50 == 0:
                    shop.report()
            except PyMongoError as error:
                log.warning("lost order %d: %s", taken, error)
            time.sleep(random.expovariate(per_second))
        log.info("closed after %d orders", taken)


if __name__ == "__main__":
    main()
