"""What loops compiled by numba are made of: registers, vectors, a cache on disk, and torch's own threads to run them on."""
