"""The tools behind the commands. A tool may import any other part of padfree; only the command line imports tools."""
