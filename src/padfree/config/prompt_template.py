"""`data.prompt_template`: a text with columns in braces, `{question}\\n\\nEnd with #### and the number.`"""

from __future__ import annotations

from string import Formatter

from padfree.errors import UserError


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Each text and the name behind it, None at the end. `{{` and `}}` are braces. Anything but names is refused."""
    cure = "write {prompt} or {column}, and {{ or }} for a brace"
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError("data.prompt_template", f"({error})", cure, value=template) from None
    for _, name, specification, conversion in found:
        if name == "" or specification or conversion:
            raise UserError("data.prompt_template", "has braces without a column in them", cure, value=template)
    parts = [(text, name) for text, name, _, _ in found]
    if all(name is None for _, name in parts):
        raise UserError("data.prompt_template", "has no {prompt}", "write where the prompt goes", value=template)
    return parts
