"""A plain WSGI app with MongoClient. Run: opentelemetry-instrument python examples/wsgi_app.py [PORT]"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import make_server

from pymongo import MongoClient

client: MongoClient[dict[str, Any]] = MongoClient(
    os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")
)
hits = client.example_wsgi.hits


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    page = environ.get("PATH_INFO", "/")
    found = hits.find_one_and_update({"_id": page}, {"$inc": {"n": 1}}, upsert=True, return_document=True)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{page}: {found['n']}\n".encode()]


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    with make_server("127.0.0.1", port, app) as server:
        server.serve_forever()
