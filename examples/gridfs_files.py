"""Files in GridFS. Run: opentelemetry-instrument python examples/gridfs_files.py"""

import os
from typing import Any

from gridfs import GridFSBucket
from pymongo import MongoClient

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")


def main() -> None:
    with MongoClient[dict[str, Any]](URI) as client:
        bucket = GridFSBucket(client.example_gridfs)
        content = os.urandom(1_000_000)
        identity = bucket.upload_from_stream("photo.raw", content)
        with bucket.open_download_stream(identity) as stream:
            same = stream.read() == content
        bucket.delete(identity)
        print(f"{len(content)} bytes, the same: {same}")


if __name__ == "__main__":
    main()
