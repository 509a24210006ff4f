"""The Megatron-Core policy. Importing this room prepares the platform, which must happen before ``megatron`` is."""

from megatron_tlt.platform.device import prepare

prepare()
