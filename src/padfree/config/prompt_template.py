"""`data.prompt_template`: text with column names in braces, such as `{question}\\n\\nEnd with #### and the number.`"""

from __future__ import annotations

from string import Formatter

from padfree.errors import UserError


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Split a template into pairs (text, name of the column after it). The last name is None.

    `{{` and `}}` are literal braces. Other braces contain the name of a column.
    """
    fix = "write {prompt} or {column}, and {{ or }} for a brace"
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError("data.prompt_template", f"({error})", fix, value=template) from None
    for _, name, specification, conversion in found:
        if name == "" or specification or conversion:
            raise UserError("data.prompt_template", "has braces without a column name", fix, value=template)
    parts = [(text, name) for text, name, _, _ in found]
    if all(name is None for _, name in parts):
        raise UserError(
            "data.prompt_template",
            "has no column name in braces",
            "write for example {prompt} for the column prompt",
            value=template,
        )
    return parts
