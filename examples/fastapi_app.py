"""FastAPI with AsyncMongoClient. Run: opentelemetry-instrument uvicorn --app-dir examples fastapi_app:app"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

URI = os.environ.get("MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncMongoClient[dict[str, Any]](URI) as client:
        app.state.orders = client.example_fastapi.orders
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{sku}")
async def order(sku: str, request: Request) -> dict[str, str]:
    try:
        result = await request.app.state.orders.insert_one({"sku": sku})
    except PyMongoError as error:  # every attempt is in the trace; here it is simply not available
        raise HTTPException(503, "try again later") from error
    return {"id": str(result.inserted_id)}


@app.get("/orders/{sku}/count")
async def count(sku: str, request: Request) -> dict[str, int]:
    return {"count": await request.app.state.orders.count_documents({"sku": sku})}
