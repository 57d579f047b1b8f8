"""How ranks start: as processes, as threads, or under a launcher."""
