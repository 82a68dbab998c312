"""What CloudFormation would hand to an instance: the template's user data for given parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

TEMPLATE = Path(__file__).parents[2] / "deploy" / "cfn-gpu-serving.yaml"


class Loader(yaml.SafeLoader):
    """Short forms become long ones: !Ref x is {"Ref": x}, !Sub x is {"Fn::Sub": x}."""


def _short(loader: Loader, suffix: str, node: yaml.Node) -> Any:
    build = {
        yaml.ScalarNode: loader.construct_scalar,
        yaml.SequenceNode: lambda n: loader.construct_sequence(n, deep=True),
        yaml.MappingNode: lambda n: loader.construct_mapping(n, deep=True),
    }[type(node)]
    value = build(node)
    if suffix == "GetAtt":
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


Loader.add_multi_constructor("!", _short)


def template() -> dict[str, Any]:
    return yaml.load(TEMPLATE.read_text(), Loader)


class Stack:
    """The template with parameters; `known` are values of resources and pseudo parameters."""

    def __init__(self, parameters: dict[str, str], known: dict[str, str]) -> None:
        self.template = template()
        defaults = {k: v.get("Default") for k, v in self.template["Parameters"].items()}
        self.values = defaults | parameters | known

    def check(self) -> None:
        """As CloudFormation does before it begins."""
        for name, rule in self.template["Parameters"].items():
            value = self.values[name]
            assert value is not None, f"{name} must be given"
            assert re.fullmatch(rule.get("AllowedPattern", ".*"), str(value)), name
            assert value in rule.get("AllowedValues", [value]), name

    def resolve(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self.resolve(i) for i in x]
        if not isinstance(x, dict):
            return x
        if len(x) == 1:
            (name, value), *_ = x.items()
            if name == "Ref":
                return self.values[value]
            if name.startswith("Fn::"):
                return getattr(self, name[4:].lower())(value)
        return {k: self.resolve(v) for k, v in x.items()}

    def sub(self, value: Any) -> str:
        text, extra = value if isinstance(value, list) else (value, {})
        values = self.values | self.resolve(extra)
        return re.sub(r"\$\{([\w:]+)\}", lambda m: str(values[m[1]]), text)

    def join(self, value: Any) -> str:
        return value[0].join(self.resolve(value[1]))

    def equals(self, value: Any) -> bool:
        a, b = self.resolve(value)
        return a == b

    def base64(self, value: Any) -> str:
        return self.resolve(value)  # the instance decodes it

    def findinmap(self, value: Any) -> str:
        table, *keys = self.resolve(value)
        return self.template["Mappings"][table][keys[0]][keys[1]]

    def condition(self, name: str) -> bool:
        return self.resolve(self.template["Conditions"][name])

    def if_(self, value: Any) -> Any:
        return self.resolve(value[1 if self.condition(value[0]) else 2])

    def not_(self, value: Any) -> bool:
        return not self.resolve(value[0])

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, f"{name}_")  # if and not are words of Python

    def user_data(self) -> str:
        self.check()
        data = self.template["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
        return self.resolve(data["UserData"])
