"""Who waits for whom, and what went through although the ranks did not make the same call."""
