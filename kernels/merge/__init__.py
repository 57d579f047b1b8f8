"""Sums of sparse vectors, and their messages."""
