"""Optimizers by import path: found, built, and shown to be element-wise; knows torch only."""
