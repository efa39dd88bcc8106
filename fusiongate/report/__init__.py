"""What is told about kernels and runs: pages that are generated, so that they cannot drift from what they describe."""
