"""An agent that does not know padfree: it calls a chat model at OPENAI_BASE_URL, calculates, and prints the answer."""

import json
import os
import re
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "temperature": 0.2}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    messages = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(3):
        said = ask(messages)
        found = re.search(r"(\d+)\+(\d+)=$", said)
        if found is None:
            break
        result = str(int(found[1]) + int(found[2]))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    if "boom" in said:
        raise RuntimeError("boom")
    sys.stdout.write(f"{said}\n")


main()
