"""What a layout needs and takes, before it is paid for: devices, memory and time models, searches, simulation."""
