"""Strict reading of one knob's value, whether it comes from Python, a YAML file or an
environment variable.

Text is accepted where it can mean only one thing: `"4"` is 4, `"true"` is True,
`'["Block"]'` is a list. Nothing is guessed: `"4.0"` is no integer, `1` is no boolean,
and a misspelt word is answered with the words that are allowed. Each function here
makes a *reader*, called as `reader(knob, value)`, which returns the value or raises a
`ValueError` that names the knob, the value, what is allowed and what to type.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Reader = Callable[[str, Any], Any]

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
NONE = ("none", "null")
# The names of dtypes in Accelerate's, Lightning's and Transformers' options.
_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
}


def refusal(knob: str, value: Any, allowed: str, fix: str = "") -> ValueError:
    """Return the one shape of our complaints: `knob=value is not allowed; allowed: ...;
    write ...`."""
    # A field is typed inside of its knob's mapping.
    if "." in knob and "write" not in fix:
        fix = f"{fix} write {typed(knob, '...')}".lstrip()
    text = f"{knob}={value!r} is not allowed; allowed: {allowed}"
    return ValueError(f"{text}; {fix}" if fix else text)


def typed(knob: str, text: str) -> str:
    """Show how a value is typed: `knob=text`, and for a field of one `knob={'field':
    text}`."""
    # Places in lists and mappings are left out of what is to be typed.
    top, _, field = knob.partition("[")[0].partition(".")
    return f"{top}={{{field!r}: {text}}}" if field else f"{top}={text}"


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is most like `name` (difflib ratio of at least
    `cutoff`), or None when none is like it."""
    # Cases and dashes are the usual differences.
    found = difflib.get_close_matches(
        name.lower().replace("-", "_"), list(known), n=1, cutoff=cutoff
    )
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question after the nearest of the known names, which follows a
    statement; "": none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_name(
    what: str, name: str, known: Sequence[str], listed_in: str
) -> ValueError:
    """Return the complaint about a name that is not in `known`: the nearest known ones,
    or where they are listed."""
    near = difflib.get_close_matches(
        name.lower().replace("-", "_"), known, n=3, cutoff=0.5
    )
    # One that is much like it was meant; of others, a few to choose from.
    much_like = nearest_name(name, near, cutoff=0.8)
    meant = [much_like] if much_like else near
    hint = (
        f"did you mean {' or '.join(map(repr, meant))}?"
        if meant
        else f"none is like it; {listed_in} lists them"
    )
    return ValueError(f"unknown {what} {name!r}; {hint}")


def boolean() -> Reader:
    """Return True or False; in text also yes/no, on/off, 1/0."""

    def read(knob: str, value: Any) -> bool:
        # The number 1 is no boolean; the text "1" of a variable is one.
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else None
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise refusal(
            knob,
            value,
            "true, false",
            f"write {typed(knob, 'true')} or {typed(knob, 'false')}",
        )

    return read


def integer(minimum: int) -> Reader:
    """Return an integer of at least `minimum`; booleans and floats are refused."""

    def read(knob: str, value: Any) -> int:
        number = _integer_in(value)
        if number is None or number < minimum:
            raise refusal(
                knob,
                value,
                f"an integer of at least {minimum}",
                f"write for example {typed(knob, str(minimum))}",
            )
        return number

    return read


def number(
    above: float, below: float = math.inf, *, include_lowest: bool = False
) -> Reader:
    """Return a finite float in (above, below), or in [above, below) with
    `include_lowest`."""
    bracket = "[" if include_lowest else "("
    allowed = f"a number in {bracket}{above:g}, {below:g})"

    def read(knob: str, value: Any) -> float:
        parsed: float | None = None
        # True is an int to Python, and no number here.
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                parsed = float(value)
            except ValueError:
                parsed = None
        # "nan" and "inf" are floats to Python as well.
        if parsed is None or not math.isfinite(parsed) or parsed >= below:
            raise refusal(knob, value, allowed)
        if parsed < above or (parsed == above and not include_lowest):
            raise refusal(knob, value, allowed)
        return parsed

    return read


def word(*choices: str) -> Reader:
    """Return one of the words given, in any case."""

    def read(knob: str, value: Any) -> str:
        found = value.strip().lower() if isinstance(value, str) else None
        if found not in choices:
            near = nearest_name(found, choices) if found else None
            raise refusal(
                knob,
                value,
                ", ".join(map(repr, choices)),
                f"did you mean {near!r}?" if near else "",
            )
        return found

    return read


def dtype_name(*choices: str) -> Reader:
    """Return one of the dtype names given; `torch.bfloat16` and `"torch.bfloat16"` are
    read as `"bfloat16"`."""
    read_word = word(*choices)

    def read(knob: str, value: Any) -> str:
        # torch is not imported here, so its dtypes are known by their class's name.
        text = str(value) if type(value).__name__ == "dtype" else value
        return read_word(
            knob,
            text.strip().removeprefix("torch.") if isinstance(text, str) else value,
        )

    return read


def names() -> Reader:
    """Return a list of non-empty strings, as a tuple; in text a JSON list, or one name
    by itself."""

    def read(knob: str, value: Any) -> tuple[str, ...]:
        several = '["first", "second"]'
        example = f"write for example {typed(knob, several if '.' in knob else repr(several))}"
        # One name, or several as a list; in text several are JSON.
        listed: Any = value
        if isinstance(value, str):
            listed = [value.strip()]
            if value.strip().startswith("["):
                try:
                    listed = json.loads(value)
                except json.JSONDecodeError as error:
                    raise refusal(
                        knob, value, f"a JSON list of names ({error})", example
                    ) from None
            elif "," in value:
                raise refusal(knob, value, "one name, or a JSON list of names", example)
        # Sets have no order, which decides where the first match counts.
        if isinstance(listed, (set, frozenset)) or not isinstance(listed, Iterable):
            raise refusal(knob, value, "a list of names", example)
        found = tuple(listed)
        if not all(isinstance(name, str) and name.strip() for name in found):
            raise refusal(knob, value, "a list of names, none of them empty", example)
        return tuple(name.strip() for name in found)

    return read


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of the pairs of a JSON object (``object_pairs_hook``); of a key
    that is written twice json would keep the last value in silence.

    Raises:
        ValueError: a key that is written twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is written twice")
    return made


def _from_json(knob: str, value: Any, begin: str, what: str) -> Any:
    """Return what a text holds that begins like JSON of this kind; other values as they
    are."""
    if not isinstance(value, str) or not value.strip().startswith(begin):
        return value
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise refusal(knob, value, f"{what} ({error})") from None


def integers(minimum: int) -> Reader:
    """Return a list of integers of at least `minimum`, not empty, as a tuple; in text a
    JSON list."""
    one = integer(minimum)

    def read(knob: str, value: Any) -> tuple[int, ...]:
        listed = _from_json(knob, value, "[", "a JSON list of integers")
        if not isinstance(listed, (list, tuple)) or not listed:
            raise refusal(knob, value, f"a list of integers of at least {minimum}")
        return tuple(one(f"{knob}[{place}]", item) for place, item in enumerate(listed))

    return read


def mapping(of: Reader) -> Reader:
    """Return a mapping from non-empty names to values that `of` reads, not empty; in
    text a JSON object."""

    def read(knob: str, value: Any) -> dict[str, Any]:
        found = _from_json(knob, value, "{", "a JSON object")
        # An empty mapping would ask for nothing in silence.
        if not isinstance(found, Mapping) or not found:
            raise refusal(knob, value, "a mapping from names")
        if not all(isinstance(name, str) and name.strip() for name in found):
            raise refusal(knob, value, "a mapping from names, none of them empty")
        return {
            name.strip(): of(f"{knob}[{name.strip()!r}]", item)
            for name, item in found.items()
        }

    return read


def pattern(expression: str) -> Reader:
    """Return text that matches the whole regular expression."""

    def read(knob: str, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(expression, value.strip()):
            raise refusal(knob, value, f"text that matches {expression}")
        return value.strip()

    return read


def function(signature: str) -> Reader:
    """Return a callable that is not a class, taken as it is; `signature` is shown in
    the complaint."""

    def read(knob: str, value: Any) -> Any:
        if not callable(value) or isinstance(value, type):
            raise refusal(knob, value, f"a function {signature}")
        return value

    return read


def anything() -> Reader:
    """Return a reader that takes every value as it is, for what another library
    reads."""
    return lambda knob, value: value


def nothing() -> Reader:
    """Return a reader of None; in text `none` or `null`."""

    def read(knob: str, value: Any) -> None:
        if value is None or (isinstance(value, str) and value.strip().lower() in NONE):
            return None
        raise refusal(knob, value, "none")

    return read


def either(*readers: Reader, allowed: str) -> Reader:
    """Return the first of `readers` that accepts the value; `allowed` describes them
    together in the complaint."""

    def read(knob: str, value: Any) -> Any:
        # Readers are tried in their order, which matters where text could mean two
        # things.
        for reader in readers:
            try:
                return reader(knob, value)
            except ValueError:
                continue
        raise refusal(knob, value, allowed, _word_hint(value, allowed))

    return read


def _integer_in(value: Any) -> int | None:
    # operator.index takes numpy's and torch's integers, and booleans too.
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        digits = value.strip()
        return int(digits) if digits.removeprefix("-").isdecimal() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _word_hint(value: Any, allowed: str) -> str:
    """Return `did you mean 'world'?` when the text given is almost one of the words
    quoted in `allowed`, else no text."""
    # The words are those in quotes in the description of what is allowed.
    quoted = allowed.replace('"', "'").split("'")[1::2]
    if not isinstance(value, str):
        return ""
    spelled_out = _SHORT_DTYPES.get(value.lower())
    near = (
        spelled_out
        if spelled_out in quoted
        else nearest_name(value, quoted, cutoff=0.6)
    )
    return f"did you mean {near!r}?" if near else ""
