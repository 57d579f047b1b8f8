"""Casts between wide and 16-bit floats, with a factor."""
