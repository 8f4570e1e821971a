"""Options in a policy's name: ``h2o:recent_share=0.25``, ``snapkv:kernel=7:pooling=max``, ``ema:16``."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Collection
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from kvlearn.policies.base import Policy

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_options(policy: type[Policy], text: str) -> dict[str, Any]:
    """Read what follows a policy's name.

    Args:
        policy: the class whose dataclass fields are the options.
        text: ``name=value`` parts separated by colons (commas separate policies); the first may be a bare value of the
            policy's first option.

    Returns:
        Values by option, in the types that the class declares.

    Raises:
        KvlearnError: an unknown option (the nearest is suggested), one given twice, or a value of another type.
    """
    known = options_of(policy)
    options: dict[str, Any] = {}
    for number, part in enumerate(text.split(":")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals and number == 0 and known:
            name, value = next(iter(known)), name
        check_options(policy, [name])
        if name in options:
            raise KvlearnError(f"policy {policy.name!r}: option {name!r} is given twice.")
        try:
            options[name] = _convert(value, known[name])
        except ValueError:
            raise KvlearnError(
                f"policy {policy.name!r}: option {name!r} is {value!r}; it takes {_describe(known[name])}."
            ) from None
    return options


def check_options(policy: type[Policy], names: Collection[str]) -> None:
    """Refuse names that are no options of ``policy``, with the nearest one that is."""
    known = options_of(policy)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise KvlearnError(f"policy {policy.name!r} has no option {name!r}; {hint}{has}.")


def options_of(policy: type[Policy]) -> dict[str, Any]:
    """The options that can be written in a name, and their types: the fields of plain type.

    A field with ``metadata={"option": False}`` is none.
    """
    asked = [field for field in fields(policy) if field.init and field.metadata.get("option", True)]
    types = {field.name: _type_of(policy, field) for field in asked}
    return {name: hint for name, hint in types.items() if _describe(hint)}


def describe_options(policy: type[Policy]) -> str:
    """Options at their defaults, as they would be typed: ``kernel=5:pooling=avg``."""
    return ":".join(f"{name}={getattr(policy, name)}" for name in options_of(policy))


def _type_of(policy: type[Policy], field: Field[Any]) -> Any:
    if not isinstance(field.type, str):
        return field.type
    owner = next(c for c in policy.__mro__ if field.name in inspect.get_annotations(c))
    try:
        return eval(field.type, vars(sys.modules[owner.__module__]))
    except NameError:  # imported for type checkers alone, so not a plain type
        return None


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _describe(hint: Any) -> str:
    """What a value of this type looks like, or ``""`` for a type that cannot be written in a name."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}
    found = []
    for choice in _choices(hint):
        if get_origin(choice) is Literal:
            found.append(" or ".join(repr(value) for value in get_args(choice)))
        elif choice in words:
            found.append(words[choice])
        else:
            return ""
    return " or ".join(found)


def _convert(text: str, hint: Any) -> Any:
    for choice in _choices(hint):
        if get_origin(choice) is Literal:
            if text in get_args(choice):
                return text
        elif choice is NoneType:
            if text.lower() == "none":
                return None
        elif choice is bool:
            if text.lower() in _BOOLEANS:
                return _BOOLEANS[text.lower()]
        else:
            try:
                value = choice(text)
            except ValueError:
                continue
            if text and (choice is not float or math.isfinite(value)):
                return value
    raise ValueError(text)
