"""Imports pyarrow, which Parquet files need. Importing this module raises ConfigError if it is missing."""

from psfleet.core.base.errors import not_installed

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    raise not_installed("Parquet files need", "pyarrow", "parquet") from None

__all__ = ["pa", "pc", "pcsv", "pq"]
