"""Observe only: PyMongo's own loop decides."""

from __future__ import annotations

from otel_retry.policy import RetryPolicy


class DriverPolicy(RetryPolicy):
    """Never asked anything: the seam leaves the driver's loop in place for it."""

    name = "driver"
