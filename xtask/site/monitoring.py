"""Checks of the alert rules and of the dashboard: their expressions parse, and every metric that they name exists."""

import json
import re
from pathlib import Path

import promql_parser
import yaml

SUFFIXES = ["_bucket", "_sum", "_count"]


def problems(docs):
    """Returns one line for each problem."""
    known = metrics((docs / "reference/metrics.md").read_text())
    found = []
    for place, expression in [*rules(docs / "operations/alerts.yml"), *panels(docs / "operations/dashboard.json")]:
        try:
            named = set()
            selectors(promql_parser.parse(expression), named)
        except ValueError as error:
            found.append(f"{place}: `{expression}` is not PromQL: {error}")
            continue
        if not named:
            found.append(f"{place}: `{expression}` names no metric")
        found += [f"{place}: no `{name}` in reference/metrics.md" for name in sorted(named - known)]
    return found


def metrics(page):
    """The series of the reference page: its tables have the name, the type and the help text."""
    known = {"up"}
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE):
        known |= {name + suffix for suffix in SUFFIXES} if kind == "histogram" else {name}
    return known


def rules(file):
    document = yaml.safe_load(file.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            place = f"{file.name}, {rule.get('alert', '?')}"
            missing = [key for key in ("alert", "expr", "for", "labels", "annotations") if key not in rule]
            assert not missing, f"{place}: no {missing}"
            promql_parser.parse_duration(rule["for"])
            yield place, rule["expr"]


def panels(file):
    document = json.loads(file.read_text())
    for panel in document["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$__range", "1h")
            yield f"{file.name}, {panel['title']}", expression


def selectors(node, named):
    """Collects the names of metrics in an expression."""
    name = getattr(node, "name", None)
    if type(node).__name__ == "VectorSelector" and name:
        named.add(name)
    for attribute in ("expr", "lhs", "rhs", "args", "vector_selector", "param"):
        child = getattr(node, attribute, None)
        for one in child if isinstance(child, list) else [child]:
            if type(one).__module__ == "promql_parser":
                selectors(one, named)
