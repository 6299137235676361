"""What otel_retry costs: `python -m benchmarks` measures it, docs/performance.md explains it."""
