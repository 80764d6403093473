"""Requests to an application in this process."""

from typing import Any

import httpx
from fastapi import FastAPI


def client(app: FastAPI, host: str = "127.0.0.1", port: int = 7623, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:{port}", **options)
