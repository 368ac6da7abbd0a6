"""Other people's numbers: files of arrays, and the projections they hold, by our names."""
