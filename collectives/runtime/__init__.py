"""Machines that run a plan, one small file each."""
