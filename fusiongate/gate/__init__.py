"""The gate: fusions, their signatures, first sight, policies and counters."""
