"""Placement and parallelism over unequal devices and links, after HetRL (arXiv 2512.12476); pure."""
