"""Two gates as people write them by hand, each with tests of its own that pass."""
