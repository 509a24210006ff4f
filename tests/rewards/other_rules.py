"""What others would say of a response: math-verify alone, and verl's two rules, restated from their documentation."""

from __future__ import annotations

import re

_GSM8K = re.compile(r"#### (-?[0-9.,]+)")


def math_verify_alone(answer: str, response: str) -> bool:
    """As verl's ``math_verify`` score and the library's README call it: the whole response is parsed."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)
    given = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def verl_gsm8k(answer: str, response: str) -> bool:
    """The number after the last ``#### ``, without commas, must equal the answer as text."""
    found = _GSM8K.findall(response)
    return bool(found) and found[-1].replace(",", "") == answer.replace(",", "")


def verl_math(answer: str, response: str) -> bool:
    """The last box, normalized, must be the normalized answer as a text."""
    inside = _last_box(response)
    return inside is not None and _normalized(inside) == _normalized(answer)


def _last_box(response: str) -> str | None:
    _, found, rest = response.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if found and depth == 0:
            return rest[:position]
    return None


def _normalized(text: str) -> str:
    text = re.sub(r"\\!|\n|\\left|\\right|\^\{?\\circ\}?|\\\$|\\?%", "", text.replace(r"\\", "\\"))
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    text = text.split(r"\text{ ")[0] if text.count(r"\text{ ") == 1 else text
    text = re.sub(r"(^|[\s{])\.", r"\g<1>0.", text)
    name, equals, value = text.partition("=")
    text = value if equals and "=" not in value and len(name.strip()) <= 2 else text
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text.strip()).replace(" ", "")
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = r"\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
