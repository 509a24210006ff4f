"""Entry points of the processes that torchrun starts, one module per job."""
