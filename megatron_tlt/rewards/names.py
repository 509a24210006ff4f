"""Distinguishes names in equations (``x``, ``f(3)``, ``Area``) from expressions (``2x``, ``x+1``)."""

from __future__ import annotations

import re

_GREEK = (
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon"
    r"|phi|chi|psi|omega|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])"
)
_ENCLOSED = r"\\(?:text\w*|math\w+|mbox|operatorname|overline|vec|hat|bar|widehat|tilde)\s*\{[^{}]+\}"
_SUFFIX = r"(?:_(?:\w|\{[^{}]*\})|'|\^(?:\{(?:-1|\\prime)\}|\\prime))"
_SYMBOL = rf"(?:{_GREEK}|{_ENCLOSED}|[A-Za-z]){_SUFFIX}*"
_FUNCTION = r"\\(?:sin|cos|tan|cot|sec|csc|det|Pr|gcd|min|max)(?![A-Za-z])"
_ARGUMENTS = r"\s*\([^()]*(?:\([^()]*\)[^()]*)*\)"
_OPERAND = r"[+-]?(?:\\[A-Za-z]+|[A-Za-z]|\d+(?:\.\d+)?)"
_NAME = re.compile(
    "|".join(
        (
            _SYMBOL,
            rf"(?:{_FUNCTION}|\\(?:angle|triangle|Delta)(?![A-Za-z]))\s*{_SYMBOL}",
            r"\\angle\s*[A-Z]{3}",
            r"\|[A-Z]{2}\|",
            r"(?:[A-Za-z]{2,}|\\text\{[^{}]+\})[A-Za-z\s:]*",  # Area of ABC
            r"\\[dt]?frac\{d[^{}]*\}\{d[^{}]*\}",  # dy/dx
            rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})*\s*\)",  # (x, y)
            rf"(?:{_FUNCTION}|(?:[fghA-Z]|{_ENCLOSED}){_SUFFIX}*|[A-Za-z]{{3,}}){_ARGUMENTS}",
            # Other letters may be factors: x(t) is a name, x(x+1) is not.
            rf"(?:[a-z]|{_GREEK}){_SUFFIX}*\s*\(\s*{_OPERAND}(?:\s*,\s*{_OPERAND})*\s*\)",
        )
    )
)


def names_quantity(text: str) -> bool:
    """Whether ``text`` is a symbol, symbols in brackets, a function call, or words."""
    return _NAME.fullmatch(re.sub(r"\\(?:left|right)(?![a-z])", "", text)) is not None
