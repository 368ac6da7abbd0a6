"""The loops of the passes over maps and of products of pairs, compiled by numba, and the kernels for GPUs, by Triton."""
