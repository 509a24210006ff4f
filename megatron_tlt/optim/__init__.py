"""Loads and builds optimizers by import path and checks that they are element-wise; depends on torch only."""
