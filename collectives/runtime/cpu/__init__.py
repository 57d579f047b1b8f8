"""The CPU runtime: ranks are processes of one machine and use shared memory."""
