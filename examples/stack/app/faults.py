"""Make the shop's database refuse work now and then, as an overloaded one does: bursts of overload, a lost connection.

It uses the server's failpoint `failCommand`, which exists only where mongod was started with enableTestCommands=1.
Only connections of the application named `shop` are hit.
"""

from __future__ import annotations

import itertools
import logging
import os
import time

from pymongo import MongoClient

log = logging.getLogger("faults")

COMMANDS = ["find", "insert", "findAndModify", "aggregate"]
OVERLOAD = {"errorCode": 462, "errorLabels": ["RetryableError", "SystemOverloadedError"]}
LOST_CONNECTION = {"closeConnection": True}

# What happens, with which probability for each command, and for how many seconds; then it starts again.
SCRIPT = (
    ("calm", None, 0.0, 60.0),
    ("overload, a fifth of the commands", OVERLOAD, 0.2, 30.0),
    ("calm", None, 0.0, 45.0),
    ("connections are lost", LOST_CONNECTION, 0.05, 15.0),
    ("calm", None, 0.0, 45.0),
    ("overload, nine commands of ten", OVERLOAD, 0.9, 20.0),
)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with MongoClient(os.environ["MONGODB_URI"]) as client:
        for title, fault, probability, seconds in itertools.cycle(SCRIPT):
            log.info("%s, for %g s", title, seconds)
            if fault is None:
                client.admin.command("configureFailPoint", "failCommand", mode="off")
            else:
                client.admin.command(
                    "configureFailPoint",
                    "failCommand",
                    mode={"activationProbability": probability},
                    data={"failCommands": COMMANDS, "appName": "shop", **fault},
                )
            time.sleep(seconds)


if __name__ == "__main__":
    main()
