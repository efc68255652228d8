"""What transfers cost: bandwidths, and how messages grow with the batch."""
