"""RPC in a trace: requests and replies, joined from events and from the agents' logs; of what kind each is."""
