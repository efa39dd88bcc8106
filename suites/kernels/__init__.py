"""The kernels, on whatever device there is."""
