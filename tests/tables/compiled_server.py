"""Imported by the process whose forks are servers: their simulated device has compiled kernels."""

from tests.tables import compiled_kernels

compiled_kernels.install()
compiled_kernels.use(compiled_kernels.CompiledOperations())
