"""The names of the roles of messages, and their aliases."""

from __future__ import annotations

ROLES = ("system", "user", "assistant", "tool")
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
}
"""Aliases of roles, which may be written in upper or lower case in the data.

Aliases of `assistant` are replaced when a row is read. Other aliases are replaced when the conversation is rendered,
unless the chat template compares roles with the alias itself.
"""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
"""The roles for the values of ShareGPT's field `from`, in upper or lower case.

A message from `function_call` is a tool call as JSON text.
"""


def usual_role(role: str) -> str:
    """Return the usual name of a role (one of `ROLES`), or the role itself if it is unknown."""
    plain = role.lower()
    return plain if plain in ROLES else ROLE_ALIASES.get(plain, role)
