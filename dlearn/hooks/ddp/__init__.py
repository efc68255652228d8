"""DistributedDataParallel: buckets, gradients that become ready, and the parts of a training step."""
