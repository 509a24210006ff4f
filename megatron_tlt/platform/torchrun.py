"""torchrun as a launch starts it: ``python -m megatron_tlt.platform.torchrun`` takes torchrun's own arguments."""

from torch.distributed.run import main

from megatron_tlt.platform.deaths import failures_recorded

if __name__ == "__main__":
    with failures_recorded():
        main()
