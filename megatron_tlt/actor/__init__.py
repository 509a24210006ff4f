"""The Megatron-Core policy. Importing this package prepares the platform, before ``megatron`` is imported."""

from megatron_tlt.platform.device import prepare_imports

prepare_imports()
