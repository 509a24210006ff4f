"""Products of whole numbers, solved by a call of the calculator environment."""

from __future__ import annotations

import random
from typing import Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.marker import worked_solution


def products(rng: random.Random, min_digits: int = 2, max_digits: int = 5) -> dict[str, Any]:
    """A problem such as ``product 31*204``; each factor has between ``min_digits`` and ``max_digits`` digits.

    The solution is what a policy and the calculator say in turns: ``<calc>31*204</calc>``, ``6324``, ``#### 6324``.

    Raises:
        ConfigError: the numbers of digits are not 1 <= min_digits <= max_digits.
    """
    if not 1 <= min_digits <= max_digits:
        raise ConfigError(
            f"products: found digits {min_digits} to {max_digits}; allowed: 1 <= min_digits <= max_digits"
        )
    one, other = (
        rng.randrange(10 ** (digits - 1), 10**digits)
        for digits in (rng.randint(min_digits, max_digits), rng.randint(min_digits, max_digits))
    )
    answer = str(one * other)
    return {
        "prompt": f"product {one}*{other}\n",
        "answer": answer,
        "solution": worked_solution([f"<calc>{one}*{other}</calc>", answer], answer),
    }
