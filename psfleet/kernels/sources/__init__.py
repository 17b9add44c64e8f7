"""The texts that kernels are generated from. Read by `psfleet.kernels.generate`, never imported."""
