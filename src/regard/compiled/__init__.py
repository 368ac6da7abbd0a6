"""The building blocks of loops compiled by numba: registers, vectors, a cache on disk, and torch's own threads."""
