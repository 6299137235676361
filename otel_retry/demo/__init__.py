"""`make demo`: a real three-node MongoDB, a small shop under auto-instrumentation, three scenes, and what was seen."""
