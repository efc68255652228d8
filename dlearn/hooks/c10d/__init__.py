"""torch.distributed: every communication op at the dispatcher, process groups, and when works end."""
