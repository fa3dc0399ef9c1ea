"""`data.prompt_template`: a text with columns in braces, `{question}\\n\\nEnd with #### and the number.`"""

from __future__ import annotations

from string import Formatter

from padfree.config.rules import shown_value


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Each text and the name behind it, None at the end. `{{` and `}}` are braces. Anything but names is refused."""
    cure = "write {prompt} or {column}, and {{ or }} for a brace"
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"data.prompt_template: {shown_value(template)} ({error}); {cure}") from None
    for _, name, specification, conversion in found:
        if name == "" or specification or conversion:
            raise ValueError(
                f"data.prompt_template: {shown_value(template)} has braces without a column in them; {cure}"
            )
    parts = [(text, name) for text, name, _, _ in found]
    if all(name is None for _, name in parts):
        raise ValueError(
            f"data.prompt_template: {shown_value(template)} has no {{prompt}}; write where the prompt goes"
        )
    return parts
