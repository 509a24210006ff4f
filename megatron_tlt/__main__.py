"""``python -m megatron_tlt`` is ``tlt``."""

import sys

from megatron_tlt.cli import main

sys.exit(main())
