"""Timings of every kernel over the shapes of real models, and what shows that they can be believed."""
