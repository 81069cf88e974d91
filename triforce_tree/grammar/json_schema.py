"""Finds what of a JSON schema cannot be enforced while a text is generated.

The compiler of grammars ignores such keywords, so that the text could violate the schema. They are refused
here, by name. What the compiler does with each keyword is tested by ``scripts/checks/grammar_fuzz.py``.
"""

import json
from itertools import combinations
from typing import Any

# Keywords that say nothing about which values are valid; $defs are visited.
_SILENT = frozenset(
    """
    title description default examples example deprecated readOnly writeOnly $comment $schema $id id $anchor
    $vocabulary $defs definitions contentEncoding contentMediaType
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "minProperties",
        "maxProperties", "unevaluatedProperties",
    },
    "boolean": set[str](),
    "null": set[str](),
}  # fmt: skip
_UNIONS = ("anyOf", "oneOf", "allOf")
# Keywords of JSON Schema. Others have no meaning, and are ignored as the standard says.
_ALL = frozenset().union(*_OF_TYPE.values(), _UNIONS) | frozenset(
    """
    type enum const $ref not if then else dependentSchemas dependentRequired dependencies contains minContains
    maxContains uniqueItems additionalItems unevaluatedItems unevaluatedProperties propertyNames $dynamicRef
    $recursiveRef multipleOf
    """.split()  # noqa: SIM905
)
# Values with which a keyword allows everything.
_NEUTRAL: dict[str, Any] = {
    "uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True, "minLength": 0,
    "minItems": 0, "minProperties": 0,
}  # fmt: skip
_REMEDY = "leave it out, and check the text afterwards"


def check_schema(schema: Any) -> None:
    """Raises ValueError if a schema has a keyword that cannot be enforced; the message says where."""
    _check(schema, "the schema", schema)


def _check(schema: Any, place: str, root: Any) -> None:
    if schema is True:
        return
    if schema is False:
        raise ValueError(f"{place} is False, which no value satisfies; leave it out")
    if not isinstance(schema, dict):
        raise ValueError(f"{place} is {schema!r}, and must be an object or true")
    for name in ("$defs", "definitions"):
        for key, part in _dict(schema.get(name)).items():
            _check(part, f"{place}.{name}.{key}", root)
    given = {
        name for name in schema.keys() & _ALL
        if name not in _SILENT and not (name in _NEUTRAL and schema[name] == _NEUTRAL[name])
    }  # fmt: skip
    if not given:
        return
    for names, check in (
        ({"$ref"}, _of_reference), ({"const", "type"}, _of_values), ({"enum", "type"}, _of_values),
        ({"anyOf"}, _of_union), ({"oneOf"}, _of_union), ({"allOf"}, _of_union),
    ):  # fmt: skip
        if given & (names - {"type"}):
            if others := given - names:
                raise ValueError(
                    f"{place} has {min(others)!r} beside {min(names - {'type'})!r}, which is not supported; "
                    f"{_REMEDY}"
                )
            check(schema, place, root)
            return
    _of_types(schema, given, place, root)


def _of_types(schema: dict[str, Any], given: set[str], place: str, root: Any) -> None:
    types = schema.get("type")
    if types is None and "properties" in given and given <= _OF_TYPE["object"]:
        types = "object"
    if types is None:
        raise ValueError(f"{place} has {min(given)!r} without 'type'; give the type")
    types = [types] if isinstance(types, str) else types
    if (
        not isinstance(types, list)
        or not types
        or not all(isinstance(each, str) and each in _OF_TYPE for each in types)
    ):
        raise ValueError(
            f"{place} has the type {schema.get('type')!r}; give one of {', '.join(_OF_TYPE)}, or a list of "
            "them"
        )
    allowed = {"type"}.union(*(_OF_TYPE[each] for each in types))
    if others := given - allowed:
        kinds = " or ".join(types)
        raise ValueError(f"{place} has {min(others)!r}, which cannot be enforced for {kinds}; {_REMEDY}")
    if "pattern" in given and given & {"minLength", "maxLength", "format"}:
        raise ValueError(
            f"{place} has 'pattern' beside a length or format, which is not supported; say both in the "
            "pattern"
        )
    if "format" in given and given & {"minLength", "maxLength"}:
        raise ValueError(f"{place} has 'format' beside a length, which is not supported; leave one out")
    if "multipleOf" in given and given & _OF_TYPE["number"]:
        raise ValueError(f"{place} has 'multipleOf' beside a bound, which is not supported; {_REMEDY}")
    if isinstance(schema.get("items"), list):
        raise ValueError(f"{place} has a list of 'items'; its name is 'prefixItems'")
    if schema.get("items", False) is not False:
        _check(schema["items"], f"{place}.items", root)
    for number, part in enumerate(_list(schema.get("prefixItems"))):
        _check(part, f"{place}.prefixItems[{number}]", root)
    if given & _OF_TYPE["object"]:
        _of_object(schema, given, place, root)


def _of_object(schema: dict[str, Any], given: set[str], place: str, root: Any) -> None:
    named, patterns = _dict(schema.get("properties")), _dict(schema.get("patternProperties"))
    for name, parts in (("properties", named), ("patternProperties", patterns)):
        for key, part in parts.items():
            _check(part, f"{place}.{name}.{key}", root)
    others = schema.get("additionalProperties", False)
    if others is not False:
        _check(others, f"{place}.additionalProperties", root)
    if (others is not False or patterns) and "minProperties" in given:
        raise ValueError(
            f"{place} has 'minProperties' beside properties without names, which may repeat; {_REMEDY}"
        )
    if len(patterns) > 1 or (patterns and (others is not False or named)):
        raise ValueError(
            f"{place} has 'patternProperties' beside others that may hold for the same name; {_REMEDY}"
        )
    escaped = [name for name in named if json.dumps(name, ensure_ascii=False) != f'"{name}"']
    if escaped and others is not False:
        raise ValueError(
            f"{place} has 'additionalProperties' beside the name {escaped[0]!r}, which JSON escapes; "
            f"{_REMEDY}"
        )
    if "unevaluatedProperties" in given and not (named and schema["unevaluatedProperties"] is False):
        raise ValueError(f"{place} has 'unevaluatedProperties', which cannot be enforced here; {_REMEDY}")
    unknown = [name for name in _list(schema.get("required")) if name not in named]
    if unknown:
        raise ValueError(
            f"{place} requires {unknown[0]!r}, which is not among its 'properties'; describe it there"
        )


def _of_reference(schema: dict[str, Any], place: str, root: Any) -> None:
    reference, found = schema["$ref"], root
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise ValueError(
            f"{place} refers to {reference!r}; only '#' and '#/...' in the same schema are supported"
        )
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise ValueError(f"{place} refers to {reference!r}, which the schema does not have")
        found = found[name]


def _of_values(schema: dict[str, Any], place: str, root: Any) -> None:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{place} has an 'enum' that is no list of at least one value")
    types = schema.get("type", [*_OF_TYPE])
    types = [types] if isinstance(types, str) else types
    for value in values:
        if not any(_is_of(value, each) for each in types):
            raise ValueError(
                f"{place} has the value {value!r}, which is not of its 'type'; leave the value out"
            )


def _of_union(schema: dict[str, Any], place: str, root: Any) -> None:
    [name] = [name for name in _UNIONS if name in schema]
    parts = schema[name]
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{place} has {name!r} that is no list of at least one schema")
    for number, part in enumerate(parts):
        _check(part, f"{place}.{name}[{number}]", root)
    if name == "allOf" and len(parts) > 1:
        raise ValueError(
            f"{place} has 'allOf' with several schemas, which is not supported; merge them into one"
        )
    if name == "oneOf":
        for first, second in combinations(parts, 2):
            if not _disjoint(_resolved(first, root), _resolved(second, root), root):
                raise ValueError(
                    f"{place} has 'oneOf' whose schemas may hold for the same value; give them different "
                    "types, or a required property with different constants, or use 'anyOf'"
                )


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Returns the schema that a reference leads to; an empty one where it leads nowhere."""
    for _ in range(100):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        found = root
        for name in reference.split("/")[1:]:
            found = _dict(found).get(name.replace("~1", "/").replace("~0", "~"))
        schema = found
    return schema if isinstance(schema, dict) else {}


def _disjoint(first: dict[str, Any], second: dict[str, Any], root: Any) -> bool:
    """Returns whether it is certain that no value satisfies both schemas."""
    types, others = _types(first), _types(second)
    if types is not None and others is not None and not _overlap(types, others):
        return True
    values, other_values = _values(first), _values(second)
    if values is not None and other_values is not None:
        return not any(one == other for one in values for other in other_values)
    if types != {"object"} or others != {"object"}:
        return False
    properties, other_properties = _dict(first.get("properties")), _dict(second.get("properties"))
    return any(
        _disjoint(_resolved(properties.get(name), root), _resolved(other_properties.get(name), root), root)
        for name in {*_list(first.get("required"))} & {*_list(second.get("required"))}
    )


def _types(schema: dict[str, Any]) -> set[str] | None:
    """Returns the types of a schema's values; None if they are not known."""
    if (values := _values(schema)) is not None:
        return {name for name in _OF_TYPE for value in values if _is_of(value, name)}
    types = schema.get("type", "object" if "properties" in schema else None)
    return {types} if isinstance(types, str) else set(types) if isinstance(types, list) else None


def _overlap(first: set[str], second: set[str]) -> bool:
    widened = [kinds | {"integer"} if "number" in kinds else kinds for kinds in (first, second)]
    return bool(widened[0] & widened[1])


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists, or None."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else None


def _is_of(value: Any, name: Any) -> bool:
    if isinstance(value, bool):
        return bool(name == "boolean")
    kinds: dict[str, Any] = {
        "string": str, "integer": int, "number": (int, float), "array": list, "object": dict,
        "boolean": bool, "null": type(None),
    }  # fmt: skip
    return isinstance(value, kinds.get(name, ())) or (
        name == "integer" and isinstance(value, float) and value.is_integer()
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
