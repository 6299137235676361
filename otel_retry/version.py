"""The one place that spells the version."""

__version__ = "0.1.0"
