"""Recorders that are off by default, each in one file: `dlearn.record(..., sources=["tcp_store"])`."""
