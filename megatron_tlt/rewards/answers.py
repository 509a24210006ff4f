"""Equality of two mathematical answers: math-verify's parser and comparison, with stricter rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from megatron_tlt.rewards.extract import LABEL
from megatron_tlt.rewards.names import names_quantity

#: A longer text is not a final answer. It is compared as text, because parsing time grows faster than linearly.
_PARSED_CHARACTERS = 1000

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "\u222a": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "\u00a0": " ",
        "\u202f": " ",
    }
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NOT_UNITS = rf"(?!(?:and|or|to|not|by|dozen|percent\w*|pct|cent|{'|'.join(_SCALES)})\b)"
_NUMBER = r"[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"

#: Notations that math-verify's parser ignores or misreads as a product or sum, in the order of their replacement.
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\?[$]|[€£]", ""),
        (r"^\\[\[(]|\\[\])]$|^[*`\s]+|[*`\s]+$", ""),
        (r"^\\(?:text|textbf|mathbf|mathrm|mbox|boldsymbol)\{([^{}]*)\}$", r"\1"),
        (r"(?:\\[,;:! ]|[.,;:\s\\])+$", ""),
        (r"^\\approx\s*", ""),
        (r"\\varnothing", r"\\emptyset"),
        (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
        (r"(?<!\\)(?:√|\bsqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"\*\*", "^"),
        (rf"^({_NUMBER})[eE]([+-]?\d+)$", r"\1\\times10^{\2}"),
        (r"(?<![\d.])(\d+)(?:\s|\\ )+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
        (r"\s*,?\s*\\text\{\s*(?:and|or)\s*\}\s*|(?<=[\d})])\s*,?\s+(?:and|or)\s+", ", "),
        (
            rf"(?<=\d)(?:\s|\\ )*(?:\\text\{{\s*)?({'|'.join(_SCALES)})\b\s*\}}?",
            lambda match: rf"\times10^{{{_SCALES[match[1]]}}}",
        ),
        # 12 345 and 12\,345; also 1,234 if separating commas are followed by a space
        (r"(?<![\d.,])\d{1,3}(?:(?:\\[,;! ]|~| )\d{3})+(?!\d)", lambda match: re.sub(r"\D", "", match[0])),
        (rf"^({_NUMBER})\s+(?:{_NOT_UNITS}[A-Za-z]{{2,}}(?:/[a-z]+|\.)?\s*){{1,3}}$", r"\1"),
        (r"^([^=]*[^=<>!\s])\s*=\s*([A-Za-z])$", r"\2=\1"),
    )
]
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_TEXT_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf)\{([^{}]*)\}|\\[,;:! ]|~")
_CHOICE = re.compile(r"\(([A-J])\)(?:\s.*)?|([A-J])(?:[).:](?:\s.*)?)?")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*([ap])\.?\s*m\b\.?)?", re.IGNORECASE)
_BASED = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")
_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z' -]*")
#: Texts that the parser does not read completely: adjacent numbers, which it adds; a text between numbers, after which
#: it ignores everything; and bounds of a number.
_UNCLEAR = re.compile(
    r"(?<![\d_])\d+(?:\s|~|\\[,;:! ]|\\q?quad)+\d"
    r"|\d.*\\(?:text|mbox)\{[^{}]*\}(?!\^\{?\d\}?).*\d"
    r"|\bor (?:more|less|fewer)\b"
)
_SPACED = re.compile(r"(?<=\d)(, )(?=\d{3}(?!\d))| *([^\w ]) *")
_ASSIGNED = re.compile(r"(?<![\w\\{}^])([A-Za-z])\s*=\s*")
_WRAPPED = re.compile(r"((?:\\left\s*)?(?:[(\[]|\\?\{))(.*?)((?:\\right\s*)?(?:[)\]]|\\?\}))")


def same_answer(gold: str, given: str) -> bool:
    """Whether the answers ``given`` and ``gold`` are equal. Both texts must contain only an answer.

    Answers are equal if their texts or their values are: numbers (to six decimals, at least four significant digits),
    expressions, equations, intervals, tuples (in order), sets and lists (in any order). A set never equals a tuple; a
    list without brackets may equal either. ``x = 4`` equals 4, ``2x = 4`` does not; 50% equals 50 and 0.5. A comma
    before three digits separates thousands, any other comma the elements of a list. Units are ignored. There is no time
    limit.
    """
    if max(len(gold), len(given)) > _PARSED_CHARACTERS:
        return _squeezed(gold) == _squeezed(given)
    gold, given = _rewritten(gold), _rewritten(given)
    if _squeezed(gold) == _squeezed(given):
        return bool(gold)
    for compare in (_same_choice, _same_clock, _same_in_base, _same_words):
        verdict = compare(gold, given)
        if verdict is not None:
            return verdict
    if _UNCLEAR.search(gold) or _UNCLEAR.search(given) or {_brackets(gold), _brackets(given)} == {"set", "ordered"}:
        return False
    if "=" not in given:
        gold = _values_in_order(gold)
    elif len(_split(gold, "=")) == 1:
        given = _assigned_values(_values_in_order(given))
    return same_value(parsed(gold), parsed(given))


def parsed_answer(answer: str) -> list[Any]:
    """math-verify's expressions for a text that contains only an answer; empty if it is not mathematical."""
    return parsed(_rewritten(answer))


@lru_cache(maxsize=256)
def parsed(latex: str) -> list[Any]:
    """``latex`` parsed by math-verify as one answer: an expression and its text; empty if it cannot be parsed."""
    from math_verify import LatexExtractionConfig, parse

    return list(parse(f"\\boxed{{{latex}}}", [LatexExtractionConfig()], parsing_timeout=None))


def same_value(gold: list[Any], given: list[Any]) -> bool:
    """math-verify's comparison of two parsed answers."""
    from math_verify import verify

    if not gold or not given:
        return False
    return bool(
        verify(gold, given, float_rounding=_decimals(gold[0]), allow_set_relation_comp=True, timeout_seconds=None)
    )


def _decimals(gold: Any) -> int:
    """Decimals to compare: with math-verify's six, 1e-7 equals 2e-7, so small numbers keep four significant digits."""
    if not getattr(gold, "is_number", False) or not gold.is_real:
        return 6
    size = abs(gold.evalf(3))
    return max(6, 3 - Decimal(str(size)).adjusted()) if 0 < size < 1 else 6


def _rewritten(text: str) -> str:
    text = LABEL.sub("", text.translate(_UNICODE)).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text).strip()
    if re.search(r",\s", text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return text


def _squeezed(text: str) -> str:
    """Removes spaces, except between words, between numbers, and after a comma that would then separate thousands."""
    return _SPACED.sub(lambda match: match[1] or match[2], " ".join(text.split()))


def _words(text: str) -> str:
    return " ".join(_TEXT_COMMAND.sub(lambda match: match[1] or " ", text).split())


def _same_choice(gold: str, given: str) -> bool | None:
    """``C`` equals ``(C)`` and ``C) 12``."""
    wanted, found = re.fullmatch(r"\(?([A-J])\)?", _words(gold)), _CHOICE.fullmatch(_words(given))
    return wanted[1] == (found[1] or found[2]) if wanted and found else None


def _same_clock(gold: str, given: str) -> bool | None:
    """10:30 is a time, or a ratio with two digits: it equals neither 1/3 nor, if it is a.m., 10:30 p.m."""
    wanted, found = _CLOCK.fullmatch(_words(gold)), _CLOCK.fullmatch(_words(given))
    if not wanted or not found:
        return None
    halves = {half.lower() for half in (wanted[3], found[3]) if half}
    return (int(wanted[1]), wanted[2]) == (int(found[1]), found[2]) and len(halves) < 2


def _same_in_base(gold: str, given: str) -> bool | None:
    """The parser drops a number's subscript, so 101_2 would equal 101_3. The base of ``gold`` may be omitted."""
    wanted, found = _BASED.fullmatch(gold), _BASED.fullmatch(given)
    if found and not wanted:
        base = int(found[2])
        try:
            return gold == str(int(found[1], base))
        except ValueError:
            return False
    if wanted:
        return wanted.groups() == found.groups() if found else wanted[1] == given
    return None


def _same_words(gold: str, given: str) -> bool | None:
    """Compares words as text, because the parser reads them as products of their letters."""
    wanted = _words(gold)
    return _words(given).casefold() == wanted.casefold() if _WORDS.fullmatch(wanted) else None


def _brackets(text: str) -> str | None:
    text = re.sub(r"^[A-Za-z]\s*(?:=|\\in\b)\s*|\\(?:left|right)", "", text)
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    return "ordered" if text[:1] in {"(", "["} and text[-1:] in {")", "]"} and "," in text else None


def _values_in_order(text: str) -> str:
    """``x=1, y=2`` as ``(1, 2)``; any other text unchanged."""
    names = _ASSIGNED.findall(text)
    return f"({_ASSIGNED.sub('', text)})" if len(names) > 1 and len(names) == len(set(names)) else text


def _assigned_values(text: str) -> str:
    """The values of the equations in ``text``; empty unless all their other sides are names or the same value.

    ``x = 4``, ``f(3) = 4``, ``Area = 4`` and ``x = 2+2 = 4`` give 4. ``2x = 4`` and ``5 = 4`` give none.
    """
    if len(_split(text, "=")) == 1 and (wrapped := _WRAPPED.fullmatch(text)):
        inner = _assigned_values(wrapped[2])
        return inner and wrapped[1] + inner + wrapped[3]
    items: list[str] = []
    for part in _split(text, ","):
        if items and len(_split(part, "=")) == 1:
            items[-1] += f",{part}"  # element of a list: x = 1, 2
        else:
            items.append(part)
    values = [_assigned_value(_split(item, "=")) for item in items]
    return ", ".join(values) if all(values) else ""


def _assigned_value(sides: list[str]) -> str:
    """The last of an equation's ``sides``; empty if another side is neither a name nor of the same value."""
    if len(sides) == 1:
        return sides[0].strip()
    *others, value = (_rewritten(side) for side in sides)
    for side in others:
        if not names_quantity(side) and not same_value(parsed(side), parsed(value)):
            return ""
    return value


def _split(text: str, separator: str) -> list[str]:
    """``text`` cut at each ``separator`` outside of brackets."""
    depth, start, parts = 0, 0, []
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        # a relation such as >= is not an equation
        if depth == 0 and character == separator and text[max(position - 1, 0)] not in "<>":
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
