"""Selection of the largest magnitudes."""
