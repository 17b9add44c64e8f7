"""Worker's side of the consistency modes. Each module wraps a cluster's runtime and changes how it trains."""
