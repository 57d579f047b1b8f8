"""How ranks of a launcher meet, and the collectives among those on several machines, between which
torch.distributed carries data."""
