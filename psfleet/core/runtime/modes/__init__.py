"""Consistency modes, worker side: each module wraps the runtime of a cluster and changes how it trains."""
