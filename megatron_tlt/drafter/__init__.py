"""The learned drafter: models, losses, data buffer, training and evaluation; knows neither vLLM nor Megatron."""
