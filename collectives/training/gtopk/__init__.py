"""Gradients by gTop-k: options, the exchange of `DataParallel`, and the hook of DDP."""
