"""Plans: pure data and pure functions; no torch, no devices, no bytes moved."""
