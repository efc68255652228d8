"""`dlearn run`: record scripts that know nothing of it."""
