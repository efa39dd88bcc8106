"""Presets over the architectures of diffusers: their sites, their snapshots and the evidence from GPUs."""
