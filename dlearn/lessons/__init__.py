"""What lessons share: data, models, and the demo. Nothing else in dlearn needs this folder."""
