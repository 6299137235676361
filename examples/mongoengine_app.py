"""MongoEngine sits on PyMongo, so there is nothing to do. Run: opentelemetry-instrument python examples/mongoengine_app.py"""

import os

from mongoengine import Document, IntField, StringField, connect, disconnect

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")


class Item(Document):
    name = StringField(required=True)
    stock = IntField(default=0)


def main() -> None:
    connect("example_mongoengine", host=URI, uuidRepresentation="standard")
    Item.drop_collection()
    Item(name="lamp", stock=3).save()
    Item.objects(name="lamp").update_one(inc__stock=1)
    print(f"lamps: {Item.objects.get(name='lamp').stock}")
    disconnect()


if __name__ == "__main__":
    main()
