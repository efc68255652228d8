"""The commands that have a file of their own: each has `arguments(parser)`, what it takes, and `run(options)`."""
