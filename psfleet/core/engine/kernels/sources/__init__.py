"""The texts that kernels are generated from. Read by `psfleet.core.engine.kernels.generate`, never imported."""
