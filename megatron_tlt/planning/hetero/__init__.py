"""Placement and parallelism over unequal devices and links, after HetRL (arXiv 2512.12476); pure.

``cluster`` and ``workflow`` describe the devices and the tasks, ``cost`` estimates a plan's time, ``balance`` gives
each device its share. ``search`` finds a good plan, ``exhaustive`` the best one; ``uniform`` treats all devices as
equal.
"""
