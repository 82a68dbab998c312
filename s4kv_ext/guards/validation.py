"""A body that does not fit its model costs no more than one that does."""

from __future__ import annotations

from typing import Any

LISTS = ("list", "set", "frozenset")


def stop_at_first(schema: Any, seen: set[int] | None = None) -> list[type]:
    """Have every list in a pydantic core schema end at its first wrong item; gives back the models
    in it, the inner ones first.

    Of each wrong item pydantic keeps an error for each alternative it might have been, 233 for an
    item of /v1/responses: 16 KB of `{}` took 37 s and 4 GB. What is told are five of them.
    """
    seen = set() if seen is None else seen
    models: list[type] = []
    if id(schema) in seen:
        return models
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("type") in LISTS:
            schema["fail_fast"] = True
        for value in schema.values():
            models += stop_at_first(value, seen)
        if schema.get("type") == "model":
            models.append(schema["cls"])
    elif isinstance(schema, list | tuple):
        for value in schema:
            models += stop_at_first(value, seen)
    return models


def of_model(model: Any) -> None:
    """The same for a model that has just been made."""
    from pydantic_core import SchemaValidator

    schema = model.__dict__.get("__pydantic_core_schema__")
    if isinstance(schema, dict):  # else it is not whole yet
        stop_at_first(schema)
        model.__pydantic_validator__ = None  # else the new one would be made of it
        model.__pydantic_validator__ = SchemaValidator(schema)


def of_routes(app: Any) -> None:
    """The same for the bodies of all routes, whatever their models."""
    from pydantic_core import SchemaValidator

    for route in app.routes:
        adapter = getattr(getattr(route, "body_field", None), "_type_adapter", None)
        if adapter is not None and isinstance(adapter.core_schema, dict):
            # A validator is made of those that the models in it have.
            for model in stop_at_first(adapter.core_schema):
                of_model(model)
            adapter.validator = SchemaValidator(adapter.core_schema)
