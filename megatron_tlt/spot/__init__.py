"""Drafter training on released devices: pure mechanisms with plain data in and out."""
