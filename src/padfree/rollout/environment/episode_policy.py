"""`Policy`: the object with which an episode samples tokens, adds text of its environment, and branches.

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        turn = await policy.generate()              sampled; trained on
        policy.add("= 24\\n")                        text of the environment; not trained on
        await policy.generate()
        return policy.trajectory(reward=1.0)

If an episode branches, its turns form a tree. The random key of a turn depends on the seed, the batch, the response and
the position of the turn in this tree. It does not depend on when the turn is sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from padfree.data.chat_renderer import ChatRenderer
from padfree.data.conversation import read_conversation
from padfree.data.encode import Encoder, Passage, Piece
from padfree.data.image_processor import ImageSettings
from padfree.data.image_reader import ImageReader
from padfree.data.image_references import ImageReference
from padfree.data.image_store import ReadImage, images_of, unchanged_file
from padfree.data.records import RowError, shown
from padfree.data.row_images import with_images
from padfree.errors import UserError
from padfree.images import Image
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.environment.group_rewards import GroupReward
from padfree.rollout.environment.trajectory import Branch, Trajectory, Tree
from padfree.rollout.prompts import Prompt
from padfree.rollout.sampling_rng import turn_key
from padfree.rollout.token_ids import checked_ids

MARK = "\u2e28reply\u2e29"
"""Placeholder for a response. It is rendered to find the text that the chat template writes after a response."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One turn of the policy, i.e. one sampled response. `ended`: whether the last token is a stop token.

    A turn that has not ended has reached its token limit.
    """

    tokens: NDArray[np.int64]
    text: str  # without the stop token
    ended: bool


class ChatTokenizer:
    """A tokenizer for environments: encodes, decodes, and renders the text between two turns."""

    def __init__(
        self, tokenizer: Any, chat: ChatRenderer | None, vocabulary: int, images: ImageSettings | None = None
    ) -> None:
        """Create the tokenizer.

        `vocabulary`: the number of embeddings of the model, which may differ from the size of the tokenizer. `images`:
        how the model reads images in the environment's messages; None if these messages can only have text.
        """
        self._tokenizer, self.chat, self.vocabulary = tokenizer, chat, vocabulary
        self.images = images
        self._reader = None if images is None else ImageReader(images)
        self._prompts = Encoder(tokenizer, append_eos=False)

    def encode_prompt(self, text: str, *, begun: bool) -> list[int]:
        """Return the token ids of a text, encoded like the prompts of the data.

        `begun`: whether the text already starts with a bos token, so that none is added.
        """
        (found,) = self._prompts.encode([Passage(pieces=(Piece(text, False),), begun=begun)])
        assert not isinstance(found, RowError)
        return self.checked(found.tokens, "model.tokenizer")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. No special tokens are added, but those in the text are recognised."""
        return self.checked(self._tokenizer(text, add_special_tokens=False)["input_ids"], "model.tokenizer")

    def checked(self, ids: Any, what: str) -> list[int]:
        """Return token ids as a list. Raise a `UserError` if the model has no embedding for one of them.

        `what`: how error messages name the ids.
        """
        return checked_ids(ids, self.vocabulary, what)

    def decode(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids, including special tokens."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def need_no_placeholder(self, ids: Sequence[int]) -> None:
        """Raise a `UserError` if `ids` contain an image's placeholder token.

        Such a token in the text of an environment would stand for an image that was not given.
        """
        if self.images is not None and self.images.placeholder in ids:
            text = self.images.processor.placeholder_text
            raise UserError(
                "rollout.environment",
                f"adds text that contains {text!r}, the placeholder of an image",
                "remove the placeholder, and show the image with policy.reply",
            )

    def shown(self, content: Sequence[Any], role: str, end: str) -> tuple[list[int], tuple[Image, ...]]:
        """Return the token ids and the images of a message that the environment adds after a response.

        The ids end with the header of the next response. The positions of the images are indices in these ids.
        `content`: texts and images. `end`: the text of the response's stop token.
        """
        if self.images is None or self._reader is None or self.chat is None:
            raise UserError(
                "rollout.environment",
                "replies with a list of parts, but this run has no images",
                "reply with text, or set model.vision=true with a model whose chat template shows images",
            )
        try:
            text, references = self._rendered(list(content), role, end)
            passage = Passage(pieces=(Piece(text, False),), begun=True, images=references)
            expanded, read = self._reader.expanded(passage, None)
            ids = self.encode(expanded.pieces[0].text)
            tokens = np.array(ids, np.int32)
            if (problem := self._reader.problem(tokens, read)) is not None:
                raise RowError(f"the message {problem}")
        except RowError as error:
            raise UserError(
                "rollout.environment", f"replies with parts that cannot be used ({error})", "correct the environment"
            ) from None
        return ids, images_of([_held(one) for one in read], tokens, self.images)

    def rotary_positions(self, tree: Tree, branch: Branch) -> NDArray[np.int64] | None:
        """Return the rotary position ids [P, n] of the n tokens of `branch`, one of the episode's token sequences.

        P is the number of dimensions of a position, e.g. 3 with M-RoPE. Return None if the ids are 0, 1, 2, and so on.
        """
        if not tree.has_new_images(branch):
            return tree.prompt.rotary_positions_of(len(branch.ids))
        if self.images is None or self.images.prepare is None or not branch.images:
            return None
        request = SamplingRequest(
            tokens=branch.tokens,
            max_new_tokens=1,
            key=0,
            images=branch.images,
            sampled=np.array(branch.sampled, np.bool_),
        )
        return self.images.prepare(request.prompt).rotary_positions

    def between(self, content: str, role: str, end: str) -> str:
        """Return the text between two responses: the message `content` of `role`, and the header of the next response.

        The chat template renders the message. Without a chat template, the result is `content` itself. `end`: the text
        with which the earlier response ended.
        """
        return content if self.chat is None else self._rendered(content, role, end)[0]

    def _rendered(self, content: str | list[Any], role: str, end: str) -> tuple[str, tuple[ImageReference, ...]]:
        """Render a message that stands between two responses. Return the text between them, and the message's images.

        The text has a marker in place of each image. `end`: the text with which the earlier response ended.
        """
        assert self.chat is not None
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": MARK},
        ]
        asked = [*messages, {"role": role, "content": content if isinstance(content, str) else "?"}]
        messages.append({"role": role, "content": content})
        if MARK not in self.chat.render(asked, generation_prompt=True):
            raise UserError(
                "data.chat_template",
                "leaves out earlier responses, so the environment cannot add text after a response",
                "set it to a template that keeps earlier responses",
            )
        conversation = with_images(read_conversation(messages, "messages", images=True), None)
        rendered = self.chat.prompt(conversation)
        return rendered.partition(MARK)[2].removeprefix(end), conversation.images


def _held(image: ReadImage) -> ReadImage:
    """Return the image with the bytes of its file in memory, because the environment may change or delete the file."""
    if image.path is None:
        return image
    return image._replace(path=None, content=unchanged_file(image.path, image.digest), size=0, time=0)


class Host(Protocol):
    """What an episode needs from its runner: sampled tokens, a tokenizer, and the API for agent programs."""

    chat_tokenizer: ChatTokenizer
    key: int
    temperature: float

    def respond(self, path: tuple[int, ...], request: SamplingRequest) -> Awaitable[Response]:
        """Sample a response to `request`.

        `path`: the position of the turn in the episode's tree of turns. Requests that are sampled together are ordered
        by `path`.
        """

    def serve(self, tree: Tree) -> Awaitable[str]:
        """Serve the policy of one episode as an OpenAI-compatible API, and return the URL. `tree` records the calls."""


class Policy:
    """One branch (token sequence) of an episode: samples tokens, adds text and makes new branches."""

    def __init__(self, tree: Tree, branch: Branch, host: Host) -> None:
        self.tree, self._branch, self._host = tree, branch, host
        self._generating = False
        self._full = False

    @property
    def prompt(self) -> Prompt:
        return self.tree.prompt

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token ids of the prompt and of everything that was sampled or added after it, [n]."""
        return np.array(self._branch.ids, dtype=np.int64)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """A mask [n], true for the tokens that the policy sampled. Only these tokens are trained on."""
        return np.array(self._branch.sampled, dtype=np.bool_)

    @property
    def text(self) -> str:
        """All text after the prompt, including the environment's text, without a stop token at the end."""
        ids = self._branch.ids[len(self.prompt.tokens) :]
        return self._host.chat_tokenizer.decode(ids[:-1] if self._branch.ended else ids)

    @property
    def max_new_tokens(self) -> int:
        """How many more tokens fit in this branch. `rollout.max_new_tokens` limits all tokens after the prompt."""
        return 0 if self._full else self.tree.limit - len(self._branch.ids)

    @property
    def reward(self) -> float | None:
        """The reward of this token sequence. If it is None, the `reward` argument of `trajectory` applies.

        A branch with a reward becomes a sample, also if it has no sampled tokens of its own or another branch continues
        it.
        """
        return self._branch.reward

    @reward.setter
    def reward(self, value: float) -> None:
        self._branch.reward = value

    async def generate(self, max_tokens: int | None = None) -> Turn:
        """Sample a turn of at most `max_tokens` tokens at the end of this branch.

        The turn is empty if the branch is full, i.e. if `rollout.max_new_tokens` is used up.
        """
        if self._generating:
            raise UserError(
                "rollout.environment",
                "makes two concurrent calls of generate on one branch",
                "call generate on a separate policy.branch() each time",
            )
        if max_tokens is not None and (type(max_tokens) is bool or not isinstance(max_tokens, (int, np.integer))):
            raise UserError(
                "rollout.environment", f"calls generate with max_tokens={shown(max_tokens)}", "give an integer"
            )
        if max_tokens is not None and max_tokens < 1:
            raise UserError("rollout.environment", f"calls generate with max_tokens={max_tokens}", "give 1 or more")
        max_new_tokens = self.max_new_tokens if max_tokens is None else int(min(max_tokens, self.max_new_tokens))
        if max_new_tokens < 1:
            return Turn(tokens=np.zeros(0, np.int64), text="", ended=False)
        branch, self._generating = self._branch, True
        try:
            key = turn_key(self._host.key, (*branch.path, branch.turns))
            request = SamplingRequest(
                tokens=branch.tokens,
                max_new_tokens=max_new_tokens,
                key=key,
                images=branch.images,
                sampled=None if self._host.chat_tokenizer.images is None else np.array(branch.sampled, np.bool_),
                rotary_positions=self._host.chat_tokenizer.rotary_positions(self.tree, branch),
            )
            response = await self._host.respond((*branch.path, branch.turns), request)
        finally:
            self._generating = False
        branch.write(response)
        written = response.tokens[:-1] if response.ended else response.tokens
        return Turn(tokens=response.tokens, text=self._host.chat_tokenizer.decode(written), ended=response.ended)

    def add(self, content: str | Sequence[int] | NDArray[np.integer[Any]]) -> bool:
        """Append text or token ids of the environment.

        If they exceed `max_new_tokens`, nothing is added, the branch is full, and the result is False.
        """
        tokenizer = self._host.chat_tokenizer
        ids = (
            tokenizer.encode(content)
            if isinstance(content, str)
            else tokenizer.checked(content, "rollout.environment: add")
        )
        tokenizer.need_no_placeholder(ids)
        return self._append(ids)

    def _append(self, ids: Sequence[int], images: Sequence[Image] = ()) -> bool:
        if len(ids) > self.max_new_tokens:
            self._full = True
            return False
        self._branch.add(ids, images)
        return True

    def reply(self, content: str | Sequence[Mapping[str, Any]], role: str = "user") -> bool:
        """Append a message as the chat template renders it between two responses. Return False if it does not fit.

        To show images, pass a list of parts such as `{"type": "image", "image": picture}`. `picture`: a Pillow image,
        the bytes of a file, or a path.
        """
        branch, tokenizer = self._branch, self._host.chat_tokenizer
        end = tokenizer.decode(branch.ids[-1:]) if branch.ended else ""
        if isinstance(content, str):
            return self.add(tokenizer.between(content, role, end))
        ids, images = tokenizer.shown(content, role, end)
        one_image = tokenizer.images.one_image if tokenizer.images is not None else None
        if one_image is not None and len(images) + len(branch.images) > 1:
            raise UserError(
                "rollout.environment",
                f"shows {len(images) + len(branch.images)} images in one sample, but this model can read only one, "
                f"because {one_image}",
                "show one image in each sample, or train another model",
            )
        return self._append(ids, images)

    def branch(self) -> Policy:
        """Return a second `Policy` with the same tokens. It continues separately, and samples with another seed."""
        child = Policy(self.tree, self.tree.fork(self._branch), self._host)
        child._full = self._full
        return child

    @property
    def host(self) -> Host:
        """The object that runs the episode. An environment needs it to make a `PolicyResponder`, for example."""
        return self._host

    async def base_url(self) -> str:
        """Serve the policy as an OpenAI-compatible API, and return its URL. API calls become part of the trajectory."""
        return await self._host.serve(self.tree)

    def trajectory(
        self,
        reward: float | None = None,
        *,
        answer: str | None = None,
        metrics: Mapping[str, float] | None = None,
        group_reward: GroupReward | None = None,
    ) -> Trajectory:
        """Return the trajectory, which is the result of the episode.

        `reward`: for samples without a reward of their own. If it is None, `rollout.reward` scores `answer`, or else
        the text of the sample. `metrics`: averaged over the batch, and reported as `environment/...`. `group_reward`:
        given instead of `reward` if the reward needs all episodes of the prompt.
        """
        return Trajectory(
            tree=self.tree, reward=reward, answer=answer, metrics=dict(metrics or {}), group_reward=group_reward
        )


Episode = Callable[[Prompt, Policy], Awaitable[Trajectory]]
