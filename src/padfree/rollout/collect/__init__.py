"""From the groups of a batch to its samples."""
