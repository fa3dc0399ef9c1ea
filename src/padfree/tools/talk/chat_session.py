"""A chat of several turns.

    turn 1   <|user|>Hi<|end|><|assistant|>            prompt ids, rendered by the chat template
             Hello<|end|>                              answer ids, as they were sampled
    turn 2   the prompt ids and answer ids of turn 1, and the ids of \\n<|user|>How are you?<|end|><|assistant|>

Earlier answers keep their sampled token ids, because encoding their text again could give other ids. Some templates
change earlier turns (Qwen3 removes their reasoning). If the rendered conversation therefore does not begin with the
text of the earlier turns, the whole conversation is encoded again.
"""

from __future__ import annotations

from padfree.data.conversation import Message
from padfree.tools.talk.speaker import Answer, OnText, Speaker, messages_of


class ChatSession:
    """A chat of several turns. It holds the messages so far and their token ids."""

    def __init__(self, speaker: Speaker, system: str | None = None) -> None:
        self._speaker = speaker
        self.system = system
        self.reset()

    def reset(self, system: str | None = None) -> None:
        """Forget all turns. `system` replaces the system message."""
        self.system = self.system if system is None else system
        self.messages: list[Message] = []
        self.turn = 0
        self._text, self._ids = "", list[int]()  # the conversation up to the last answer

    def ask(self, text: str, *, max_new_tokens: int, on_text: OnText | None = None) -> Answer:
        """Return the answer to `text`, the user's next message. An error or an empty answer adds no turn.

        `on_text` receives pieces of the answer as they are generated.
        """
        user: Message = {"role": "user", "content": text}
        messages = [*self.messages, user] if self.messages else messages_of(text, self.system)
        rendered = self._speaker.render(messages)
        prompt = self.prompt_ids(rendered)
        (answer,) = self._speaker.answer([prompt], max_new_tokens=max_new_tokens, turn=self.turn, on_text=on_text)
        if not len(answer.tokens):
            return answer
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.turn += 1
        self._ids = [*prompt, *answer.tokens.tolist()]
        self._text = rendered + self._speaker.chat_tokenizer.decode(answer.tokens)
        return answer

    def prompt_ids(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered conversation.

        If possible, the token ids of earlier turns are used again instead of encoding their text again.
        """
        chat_tokenizer = self._speaker.chat_tokenizer
        if self._ids and rendered.startswith(self._text):
            return [*self._ids, *chat_tokenizer.encode(rendered[len(self._text) :])]
        return chat_tokenizer.encode_prompt(rendered, begun=True)
