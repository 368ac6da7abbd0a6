"""Views of attention in the terminal, as figures, in notebooks and in the browser."""
