"""torch.distributed.rpc, at both ends, with its agent's log and its autograd graph."""
