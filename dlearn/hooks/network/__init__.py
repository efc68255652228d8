"""Connections and hosts: bytes by the kernel's counters, the job's clock, which job this is."""
