"""Passes over the graph of a compiled layer, in the order in which they run."""
