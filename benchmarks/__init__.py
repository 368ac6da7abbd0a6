"""How fast regard is: contenders proven equal, then timed in turn in one process. `python -m benchmarks`, or `make bench`."""
