"""Reinforcement learning of reasoning models on Megatron-Core and vLLM, with the long tail put to work."""

__version__ = "0.1.0"
