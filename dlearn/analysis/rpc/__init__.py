"""Questions about RPC: the messages of one iteration, the graph of distributed autograd."""
