"""The GPU runtime: one kernel launch per GPU runs a collective over the ranks' memory."""
