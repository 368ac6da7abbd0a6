"""Softmaxes in other forms: divided exponentials, edges of graphs, blocks of keys, pairs in a loop, picked keys."""
