"""`dlearn doctor`: what this machine can do for dlearn."""
