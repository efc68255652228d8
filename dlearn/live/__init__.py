"""A running job, held: its calls wait, and are let through one by one."""
