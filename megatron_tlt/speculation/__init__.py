"""Mechanisms of speculative decoding: plain data in and out, without vLLM, Megatron or a process group."""
