"""The values of a trace and its file. Needs neither torch nor matplotlib."""
