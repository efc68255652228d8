"""How many bytes, from whom to whom: traffic, two runs compared, predicted against measured."""
