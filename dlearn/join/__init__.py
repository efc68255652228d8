"""Ends meet: events of all ranks -> operations -> messages, and the bytes that these should take on the wire."""
