"""The collectives among ranks on several machines; torch.distributed carries data between these."""
