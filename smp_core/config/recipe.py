"""Recipe: what a knob with fields of its own holds, as `compression`, `activations` and
`fp8` do.

A recipe is a small frozen dataclass. Each of its fields is made by :func:`setting`,
which gives the field's default and the strict reader of its value. The knob itself
takes a recipe, a mapping of its fields (in text a JSON object), or a word for what is
asked for most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Union

from smp_core.config import values as read

R = TypeVar("R", bound="Recipe")
Held = TypeVar("Held")
Written = TypeVar("Written", contravariant=True)

if TYPE_CHECKING:

    class Knob(Generic[Held, Written]):
        """A knob that holds a recipe and takes other values too, for type checkers."""

        def __get__(self, config: object, owner: object) -> Held: ...

        def __set__(self, config: object, value: Held | Written) -> None: ...

else:
    Knob = Union[Held, Written]  # noqa: UP007  # an alias with parameters


def setting(default: Any, reader: read.Reader) -> Any:
    """Make a field of a recipe from its default and the reader of its value."""
    return dataclasses.field(default=default, metadata={"reader": reader})


@dataclasses.dataclass(frozen=True, repr=False)
class Recipe:
    """The base class of recipes.

    Attributes:
        KNOB: the knob that holds it; complaints begin with it.
        WORDS: word -> the fields that it means.
        MAIN: the field that a value by itself is read as, where there is one; its words
            need no line in ``WORDS``.
        OPTIONAL: whether the knob may be off (None, False) or on with all defaults
            (True).
        ALLOWED: what the knob takes besides fields and recipes, for complaints.
        EXAMPLE: fields as they may be written, for complaints.
    """

    KNOB: ClassVar[str]
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    MAIN: ClassVar[str | None] = None
    OPTIONAL: ClassVar[bool] = False
    ALLOWED: ClassVar[str] = ""
    EXAMPLE: ClassVar[str]

    def __post_init__(self) -> None:
        # Fields are read as strictly as knobs, under their dotted names.
        for name, reader in self.readers().items():
            object.__setattr__(
                self, name, reader(f"{self.KNOB}.{name}", getattr(self, name))
            )

    def __repr__(self) -> str:
        """Show the fields that differ from their defaults."""
        # What is at its default would hide what was chosen.
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = [
            f"{name}={value!r}"
            for name, value in self.items().items()
            if value != defaults[name]
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @classmethod
    def readers(cls) -> dict[str, read.Reader]:
        """Return field -> the strict reader of its value, in the fields' order."""
        return {
            field.name: field.metadata["reader"] for field in dataclasses.fields(cls)
        }

    def items(self) -> dict[str, Any]:
        """Return field -> value."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in types that YAML and JSON have, for :meth:`read`."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.items().items()
        }

    @classmethod
    def read(cls: type[R], value: Any) -> R | None:
        """Read the knob's value: a recipe, a mapping of fields, a word, or text that
        holds one of these.

        Returns:
            the recipe; None only where the knob may be off, and is.

        Raises:
            ValueError: none of these, an unknown field (with the nearest one), or a bad
                value of one.
        """
        # From the most particular form to the most general one.
        if isinstance(value, cls):
            return value
        if cls.OPTIONAL and _is_off(value):
            return None
        fields = value if isinstance(value, Mapping) else cls._fields_of(value)
        cls._require_known(fields)
        return cls(**fields)

    @classmethod
    def _fields_of(cls, value: Any) -> Mapping[str, Any]:
        """Read what is neither a recipe nor a mapping."""
        # JSON, as environment variables have it.
        text = value.strip() if isinstance(value, str) else ""
        if text.startswith("{"):
            try:
                fields: Mapping[str, Any] = json.loads(
                    text, object_pairs_hook=read.unique_keys
                )
            except ValueError as error:
                example = f"{cls.KNOB}='{json.dumps(_example(cls))}'"
                raise ValueError(
                    f"{cls.KNOB}={value!r} is no JSON ({error}); write for example {example}"
                ) from None
            return fields
        # Switched on, with all defaults.
        if cls.OPTIONAL and _is_on(value):
            return {}
        # A word, or the value of the main field.
        word = "none" if value is None else text.lower()
        if word in cls.WORDS:
            return cls.WORDS[word]
        # A value of the main field by itself; if it is none, the message below says
        # what is.
        if cls.MAIN is not None:
            try:
                return {cls.MAIN: cls.readers()[cls.MAIN](cls.KNOB, value)}
            except ValueError:
                pass
        # Neither: say what is allowed, and what may have been meant.
        words = [*cls.WORDS, *cls.ALLOWED.split("'")[1::2]]
        near = read.nearest_name(text, words, cutoff=0.6) if text else None
        known = ", ".join(cls.readers())
        also = f"a mapping of fields ({known}), {cls.__name__}(...)"
        fix = (
            f"did you mean {near!r}?"
            if near
            else f"write for example {cls.KNOB}={_example(cls)}"
        )
        raise read.refusal(
            cls.KNOB, value, f"{cls.ALLOWED}, {also}" if cls.ALLOWED else also, fix
        )

    @classmethod
    def _require_known(cls, fields: Mapping[str, Any]) -> None:
        known = tuple(cls.readers())
        for name in fields:
            if name not in known:
                near = read.nearest_name(str(name), known)
                hint = (
                    f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
                )
                raise ValueError(f"unknown field {name!r} of {cls.KNOB}; {hint}")


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names ("compression.gather") as knobs, with a mapping
    for those of one recipe."""
    # Fields of one recipe are gathered in one mapping.
    knobs: dict[str, Any] = {}
    for name, value in settings.items():
        knob, _, field = name.partition(".")
        if field:
            knobs.setdefault(knob, {})[field] = value
        else:
            knobs[knob] = value
    return knobs


def _is_off(value: Any) -> bool:
    return (
        value is None
        or _flag(value) is False
        or (isinstance(value, str) and value.strip().lower() in read.NONE)
    )


def _is_on(value: Any) -> bool:
    return _flag(value) is True


def _flag(value: Any) -> bool | None:
    try:
        return bool(read.boolean()("", value))
    except ValueError:
        return None


def _example(recipe: type[Recipe]) -> dict[str, Any]:
    return json.loads(recipe.EXAMPLE)
