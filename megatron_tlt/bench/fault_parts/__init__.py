"""Real parts of a run under faults, for ``tlt bench faults``.

A part maps names of faults to trials. A trial does one fault with a seeded generator in an empty folder; it raises
:class:`~megatron_tlt.bench.fault_parts.trial.Broken` if the part does not keep its promise.
"""
