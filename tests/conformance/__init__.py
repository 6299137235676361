"""PyMongo's own test suite, run with and without otel_retry and compared test by test."""
