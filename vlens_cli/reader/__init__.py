"""Reads weights out of a checkpoint, in a short-lived process of its own: the shell's side stays without numpy."""
