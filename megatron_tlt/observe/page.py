"""HTML pages from templates of this package, self-contained: without network access."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup


def page_environment() -> jinja2.Environment:
    """Jinja's settings of all pages, with the filter ``cell`` for tables."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = cell
    return environment


def render_page(template: str, environment: jinja2.Environment | None = None, **values: Any) -> str:
    """The template ``<template>.html.j2`` with the pages' common style."""
    environment = environment or page_environment()
    style = Markup(_read("page.css.j2"))
    return environment.from_string(_read(f"{template}.html.j2")).render(style=style, **values)


def _read(name: str) -> str:
    return resources.files("megatron_tlt.observe").joinpath(name).read_text(encoding="utf-8")


def cell(value: Any) -> str:
    """A value formatted for a table."""
    if value is None:
        return "–"  # noqa: RUF001
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(v) for v in value)
    return str(value)
