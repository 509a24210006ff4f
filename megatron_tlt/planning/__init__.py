"""Planning of a layout before a run: devices, memory and time models, searches, simulation."""
