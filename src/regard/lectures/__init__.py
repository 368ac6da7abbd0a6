"""The lectures' examples with every number they print, and those numbers recomputed."""
