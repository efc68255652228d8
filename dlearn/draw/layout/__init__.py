"""Where the nodes of a graph stand: on a circle, or in bands and columns."""
