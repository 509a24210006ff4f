"""Reinforcement-learning steps of a whole cluster, simulated event by event; pure, with plain data in and out.

It is above no machine: gate, choice of strategy and sessions of the spot trainer are said here once more, for many
engines at a time, and tests hold them against the product's own.
"""
