"""Maps of a job: which rank is in which process group, and how NCCL has wired them."""
