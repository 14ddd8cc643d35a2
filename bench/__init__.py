"""Benchmarks: `make bench`, or `python -m bench`. Each prints its goal and whether it is met; none
is a test. What the numbers mean is told in docs/performance.md."""
