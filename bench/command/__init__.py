"""The product's command: `linkweave plan`, `simulate`, `predict`, `topo`, ..."""
