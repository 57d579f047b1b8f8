"""linkweave in torch.distributed: the backend "linkweave", hooks for DDP, several machines."""

from linkweave.collectives.distributed.hooks import allreduce_hook, bf16_hook, fp16_hook

__all__ = ["allreduce_hook", "bf16_hook", "fp16_hook"]
