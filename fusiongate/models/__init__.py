"""Ready-made mounts for the adaLN sites of diffusion models."""
