"""Positions of pixels through a forward: where in the images the entries of each tensor come from."""
