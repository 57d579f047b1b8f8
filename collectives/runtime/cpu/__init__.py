"""Ranks that are processes of one machine, over shared memory."""
