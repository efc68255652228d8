"""Assertions about traffic and data, for exercises and for tests."""
