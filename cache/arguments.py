"""A command's options from the words of its command line, and their help."""

from __future__ import annotations

import types
from dataclasses import fields, replace
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from cache.visible import one_line

_Options = TypeVar("_Options")
_REGISTRY = ConstructorRegistry()


def parse(options: type[_Options], program: str, words: list[str]) -> _Options:
    """The options that are asked for.

    Help shows an option that may be left out (its default is None) with the type of what is
    written and without the default: what leaving it out means, its docstring says.

    Args:
      options: a frozen dataclass.
      program: what stands before the words, for help.

    Raises:
      SystemExit: help was asked for and is printed, or the words are none of the options'.
      Exception: what `options` itself raises of values that cannot be.
    """
    form = _form(options)
    shown = [one_line(word) for word in words]
    if shown != words:
        # What is wrong is told of these, for what is told repeats the words.
        tyro.cli(form, prog=program, args=shown, registry=_REGISTRY)
    read = tyro.cli(form, prog=program, args=words, registry=_REGISTRY)
    return options(**{field.name: getattr(read, field.name) for field in fields(form)})


def _form(options: type) -> type:
    """A class with the fields of an options class, for tyro to show and to fill; checks nothing."""
    shown = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        many = [part for part in (kind, *get_args(kind)) if get_origin(part) is tuple]
        if many:
            annotations.insert(0, tyro.conf.arg(metavar=f"{_spec(get_args(many[0])[0]).metavar} …"))
        if name in _unset(options):
            annotations.insert(0, tyro.conf.arg(help_behavior_hint=_unset(options)[name]))
        shown[name] = Annotated[(kind, *annotations)] if annotations else kind
    body = {"__annotations__": shown, "__doc__": options.__doc__, "__post_init__": lambda _: None}
    return type(options.__name__, (options,), body)


def _unset(options: type) -> dict[str, str]:
    """What help says instead of a default that is nothing."""
    hints = {None: "(optional)", "": "(default: none)", (): "(default: none)"}
    return {f.name: hints[f.default] for f in fields(options) if f.default in (None, "", ())}


def _spec(kind: Any) -> PrimitiveConstructorSpec[Any]:
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    assert isinstance(spec, PrimitiveConstructorSpec), spec
    return spec


@_REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """`X | None` is written as X is: leaving the option out gives None, and no word does."""
    kinds = get_args(info.type)
    if info.type_origin not in (Union, types.UnionType) or types.NoneType not in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    spec = _spec(Union[kinds])  # noqa: UP007
    return replace(spec, is_instance=lambda value: True, str_from_instance=lambda value: [])
