"""A trace in sentences."""
