"""Placement and parallelism over unequal devices and links, after HetRL (arXiv 2512.12476); pure.

``cluster`` and ``workflow`` say what there is and what has to be done, ``cost`` what a plan takes, ``balance`` gives
each device its share, ``search`` looks for a good plan, ``exhaustive`` for the best, and to ``uniform`` all are equal.
"""
