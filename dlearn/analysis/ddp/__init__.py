"""Questions about DDP: buckets over time, overlap, where the time of a training step goes."""
