"""pyarrow, which Parquet files need and which may be missing: then importing this raises ConfigError."""

from psfleet.errors import ConfigError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    raise ConfigError(
        "Parquet files need pyarrow, which is not installed; run: "
        "pip install '.[parquet]' in psfleet's checkout"
    ) from None

__all__ = ["pa", "pc", "pcsv", "pq"]
