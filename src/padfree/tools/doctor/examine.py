"""Find out how a server or a rollout file differs from a model.

A server is examined in this order:

    request       what the server returns               faults that it shows
    prompts       log-probabilities of the prompts      weights, arithmetic
    responses     log-probabilities of the responses    temperature, truncation, penalties
    plain text    token ids of a text                   tokenizer, special tokens
    messages      token ids of a conversation           chat template

If a fault is found, the model gets the same fault for the later requests. A rollout file has responses only, which are
examined for all faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from padfree.data import RolloutDataSettings, read_rollouts
from padfree.data.chat_renderer import ChatRenderer
from padfree.errors import UserError
from padfree.model import attach, lm_head_of
from padfree.model.load import load_model
from padfree.model.model_files import base_dtype, open_model
from padfree.sample import Sample
from padfree.tasks.reading import read_template
from padfree.tools.doctor.diagnosis import (
    HYPOTHESES,
    Finding,
    Noise,
    diagnose,
    explained_model,
    limit_of,
    measure_noise,
)
from padfree.tools.doctor.doctor_report import DoctorReport, TextFinding
from padfree.tools.doctor.evidence import Evidence, evidence_of_rollouts
from padfree.tools.doctor.hypothesis import Case, OlderWeights, Untested, residual
from padfree.tools.doctor.openai_api import ServerProbe, unique_texts
from padfree.tools.doctor.probes import (
    MESSAGES,
    TEXTS,
    TextAnswer,
    probe_chat,
    probe_ids,
    probe_prompts,
    probe_text,
)
from padfree.tools.doctor.prompt_hypotheses import (
    FIXES,
    TEMPLATE,
    TOKENIZER,
    Candidate,
    chat_candidates,
    chat_ids,
    special_token_candidates,
)
from padfree.tools.doctor.rescoring import logits_of, logprobs_of, rescored
from padfree.tools.talk.find_model import ModelFiles
from padfree.tools.talk.speaker import load_language_model
from padfree.train.check_data import ModelLimits, check_fits
from padfree.train.training_data import open_tokenizer

HEAD = "lm_head.weight"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patient:
    """The model that the server should serve, and other weights, to test whether the server holds those by mistake."""

    name: str
    model: PreTrainedModel  # attached, float32
    tokenizer: Any
    chat: ChatRenderer | None
    template: str | None  # the text of the chat template
    dtype: torch.dtype  # the dtype that the server is meant to compute in
    older: tuple[OlderWeights, ...]
    stored: dict[str, Tensor]

    @property
    def vocabulary(self) -> int:
        return ModelLimits.of(self.model).vocabulary


def open_patient(
    name: str,
    files: ModelFiles,
    *,
    previous: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    chat_template: str | None = None,
    device: torch.device | str = "cpu",
) -> Patient:
    """Load the model, and older weights of it that the server may still hold (folders `previous`), all in float32.

    `dtype`: the dtype in which the server is meant to compute; None: the dtype of the weight files.
    """
    config, stored = open_model(files.weights, init_setting=None)
    model, _ = load_language_model(files, torch.float32, device)
    model.train(False)
    model.requires_grad_(False)
    attach(model.to(device))  # type: ignore[arg-type]
    lm_head_of(model)
    older = [_older(folder, model, setting="--previous") for folder in previous]
    if files.adapter is not None:
        older.append(replace(_older(files.weights, model, setting="--base"), is_base=True))
    tied: dict[str, Tensor] = {}
    if getattr(config, "tie_word_embeddings", False) and stored is not None and HEAD in stored:
        with safe_open(stored[HEAD], framework="pt") as file:
            tied[HEAD] = file.get_tensor(HEAD).float().to(model.device)
    tokenizer = open_tokenizer(files.tokenizer, "MODEL")
    source = chat_template or files.chat_template
    template = None if source is None else read_template(source, "--chat-template")
    text = template or tokenizer.chat_template
    return Patient(
        name=name,
        model=model,
        tokenizer=tokenizer,
        chat=ChatRenderer(tokenizer, template) if text else None,
        template=text if isinstance(text, str) else None,
        dtype=base_dtype(config, stored) if dtype is None else dtype,
        older=tuple(older),
        stored=tied,
    )


def _older(folder: str, model: PreTrainedModel, *, setting: str) -> OlderWeights:
    try:
        other = load_model(folder, dtype=torch.float32)
    except UserError as error:
        raise error.at(setting) from None
    tensors, own = {name: tensor.to(model.device) for name, tensor in other.state_dict().items()}, model.state_dict()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != {name: tensor.shape for name, tensor in own.items()}:
        raise UserError(setting, f"{folder} has another architecture than the model", "give weights of the same model")
    return OlderWeights(name=folder, tensors=tensors, is_base=False)


class Examination:
    """The stages in which a server or a rollout file is examined, and what they find.

    The first stage measures the noise of rounding.
    """

    def __init__(self, patient: Patient, say: Say) -> None:
        self.patient, self.say = patient, say
        self.noise: Noise | None = None
        self.findings: list[Finding] = []

    def stage(self, evidence: Evidence, model: PreTrainedModel, *, sampling: bool) -> tuple[Case, Finding]:
        """Compare log-probabilities of a server (`evidence`) with those of `model`. Find the cause of any difference.

        `sampling`: consider only faults in how the server samples.
        """
        patient = self.patient
        if self.noise is None:
            self.say("measuring the noise of rounding")
            self.noise = measure_noise(patient.model, evidence)
        case = Case(
            model=model,
            evidence=evidence,
            logits=logits_of(model, evidence),
            limit=limit_of(self.noise, patient.dtype, evidence),
            older=patient.older,
            tokenizer=patient.tokenizer,
            stored=patient.stored,
        )
        chosen = [each for each in HYPOTHESES if each.sampling or not sampling]
        finding = diagnose(case, self.noise, patient.dtype, hypotheses=chosen, say=self.say)
        self.findings.append(finding)
        return case, finding

    def report(self, subject: str, texts: Sequence[TextFinding], untested: Sequence[Untested]) -> DoctorReport:
        noise = self.noise
        assert noise is not None
        name = str(self.patient.dtype).removeprefix("torch.")
        untested = [*untested, *(each for finding in self.findings for each in finding.untested)]
        return DoctorReport(
            model=self.patient.name,
            subject=subject,
            dtype=name,
            noise=(
                f"mean |difference| from rounding alone: float32 {noise.float32:.1e}, bfloat16 "
                f"{noise.bfloat16:.1e}; the server is meant to compute in {name}"
            ),
            findings=tuple(self.findings),
            texts=tuple(texts),
            untested=tuple({each.cause: each for each in untested}.values()),
        )


def read_some_rollouts(patient: Patient, path: str, count: int, *, max_length: int) -> list[Sample]:
    """Choose `count` of the rollouts that have log-probabilities, spread evenly over a rollout file."""
    settings = RolloutDataSettings(max_length=max_length, overlong="truncate")
    samples = read_rollouts(path, settings, tokenizer=patient.tokenizer).samples
    kept = [sample for sample in samples if sample.logprobs is not None and sample.num_labels] or list(samples)
    numbers = np.unique(np.linspace(0, len(kept) - 1, min(count, len(kept))).round().astype(np.int64))
    return [kept[number] for number in numbers]


def examine_rollouts(
    patient: Patient, samples: Sequence[Sample], *, subject: str, temperature: float = 1.0, say: Say = lambda _: None
) -> DoctorReport:
    """Find out why the log-probabilities in rollouts differ from the model's."""
    limits = ModelLimits.of(patient.model)
    kept = [sample for sample in samples if sample.logprobs is not None and sample.num_labels]
    if not kept:
        raise UserError("--rollouts", f"{subject} has no logprobs", "give rollouts with log-probabilities")
    check_fits(
        kept,
        limits,
        place=lambda index: kept[index].uid or index,
        setting="--rollouts",
        vocabulary_cure="give the model that wrote them",
        positions_cure=f"truncate them with --max-length {limits.positions}",
    )
    examination = Examination(patient, say)
    evidence = evidence_of_rollouts(kept, vocabulary=limits.vocabulary, temperature=temperature)
    examination.stage(evidence, patient.model, sampling=False)
    return examination.report(subject, (), ())


def examine_server(
    patient: Patient,
    url: str,
    *,
    name: str | None = None,
    temperature: float = 1.0,
    timeout: float = 120.0,
    say: Say = lambda _: None,
) -> DoctorReport:
    """Find out why a server's log-probabilities differ from the model's.

    `name`: the name of the model in requests to the server; None: the first model that the server lists.
    """
    say(f"asking {url}")
    probe = ServerProbe.at(url, unique_texts(patient.tokenizer, patient.vocabulary), name, timeout)
    examination = Examination(patient, say)
    untested: list[Untested] = []
    asked = probe_prompts(patient.model, patient.tokenizer)
    prompts, responses = probe_ids(probe, asked, vocabulary=patient.vocabulary, temperature=temperature)
    if prompts is None and responses is None:
        raise UserError(
            "--server",
            f"{probe.url} was sent a prompt of token ids, but did not return token ids and their log-probabilities",
            "give a server whose completions, like OpenAI's, accept token ids as prompt and support logprobs",
        )
    model: PreTrainedModel | None = patient.model
    if prompts is not None:
        model = explained_model(*examination.stage(prompts, patient.model, sampling=False))
    sampled_as_asked = False
    if responses is not None and model is not None:
        case, finding = examination.stage(responses, model, sampling=prompts is not None)
        sampled_as_asked = finding.state == "healthy"
        model = model if prompts is not None else explained_model(case, finding)
    elif responses is not None:
        reason = "the log-probabilities of prompts differ, and no fault of the model that explains them was found"
        untested.append(Untested(cause="sampling of responses", reason=reason))
    reader = _TextReader(patient, examination, probe, temperature, model if sampled_as_asked else None)
    texts, missing = reader.read()
    untested += missing
    untested += [Untested(cause=what, reason="the server does not support it") for what in sorted(probe.missing)]
    return examination.report(f"{probe.url} ({probe.name})", texts, untested)


class _TextReader:
    """Compares the token ids that the server makes of texts and messages with those of the model's own tokenizer.

    If the server returns no ids, they are inferred from its log-probabilities. This needs a `model` with the same
    log-probabilities as the server; None: no such model is known.
    """

    def __init__(
        self,
        patient: Patient,
        examination: Examination,
        probe: ServerProbe,
        temperature: float,
        model: PreTrainedModel | None,
    ) -> None:
        self.patient, self.examination, self.probe = patient, examination, probe
        self.temperature, self.model = temperature, model

    def read(self) -> tuple[list[TextFinding], list[Untested]]:
        patient, found, untested = self.patient, list[TextFinding](), list[Untested]()
        for what, ask in (("plain text", self._texts), ("chat messages", self._chats)):
            if what == "chat messages" and patient.chat is None:
                untested.append(Untested(cause=what, reason="the tokenizer has no chat template"))
                continue
            self.examination.say(what)
            try:
                answers = list(ask())
            except UserError as error:
                untested.append(Untested(cause=what, reason=error.problem))
                continue
            finding = self._compare(what, answers)
            if finding is not None and finding.cause == TEMPLATE and any(each.cause == TOKENIZER for each in found):
                finding = replace(finding, cause=TOKENIZER, fix=FIXES[TOKENIZER])
            if finding is None:
                reason = "the server returns no token ids, and they cannot be inferred from its log-probabilities"
                untested.append(Untested(cause=what, reason=reason))
            else:
                found.append(finding)
        return found, untested

    def _texts(self) -> Iterator[TextAnswer]:
        for text in TEXTS:
            yield probe_text(self.probe, self.patient.tokenizer, text, self.temperature)

    def _chats(self) -> Iterator[TextAnswer]:
        assert self.patient.chat is not None
        for messages in MESSAGES:
            expected = chat_ids(self.patient.tokenizer, self.patient.chat, messages)
            yield probe_chat(self.probe, messages, expected, self.temperature)

    def _candidates(self, answer: TextAnswer) -> list[Candidate]:
        patient = self.patient
        if isinstance(answer.asked, str):
            return list(special_token_candidates(patient.tokenizer, answer.expected))
        assert patient.chat is not None
        return list(chat_candidates(patient.tokenizer, patient.chat, answer.asked, patient.template))

    def _compare(self, what: str, answers: Sequence[TextAnswer]) -> TextFinding | None:
        told = [answer for answer in answers if answer.server_ids is not None]
        if told:
            wrong = [answer for answer in told if answer.server_ids != answer.expected]
            return _by_ids(what, wrong[0], self._candidates(wrong[0]), self.patient) if wrong else _right(what)
        scored = [
            answer
            for answer in answers
            if answer.answer.tokens
            and answer.answer.logprobs
            and len(answer.answer.tokens) == len(answer.answer.logprobs)
        ]
        if not scored or self.model is None:
            return None
        return self._by_scores(what, scored, self.model)

    def _by_scores(self, what: str, answers: Sequence[TextAnswer], model: PreTrainedModel) -> TextFinding:
        """Infer, from the log-probabilities of the server's responses, which prompt ids the server has read.

        `model` scores the responses after the expected prompt ids. If these scores differ from the server's, `model`
        scores the responses after the prompt ids that known faults would give.
        """

        def evidence_of(prompts: Sequence[Sequence[int]]) -> Evidence:
            rows = []
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens, logprobs = answer.answer.tokens, answer.answer.logprobs
                assert tokens is not None
                assert logprobs is not None
                whole = [*prompt, *tokens]
                rows.append((whole, len(prompt), list(range(len(prompt), len(whole))), logprobs))
            return Evidence.of("responses", rows, vocabulary=self.patient.vocabulary, temperature=self.temperature)

        def gap(prompts: Sequence[Sequence[int]]) -> float:
            evidence = evidence_of(prompts)
            return residual(evidence.observed, rescored(model, evidence))

        expected = evidence_of([answer.expected for answer in answers])
        assert self.examination.noise is not None
        limit = limit_of(self.examination.noise, self.patient.dtype, expected)
        before = residual(expected.observed, logprobs_of(logits_of(model, expected), expected))
        if before <= limit:
            return _right(what)
        lists = [self._candidates(answer) for answer in answers]
        fits = [
            (after, group[0])
            for group in zip(*lists, strict=False)
            if (after := gap([candidate.ids for candidate in group])) <= min(limit, before / 2)
        ]
        if not fits:
            says = "the server read other prompts than those that were sent, and no known fault explains which ones"
            return TextFinding(what=what, cause="unexplained", says=says, fix=FIXES[TEMPLATE], by="log-probabilities")
        best = min(fits, key=lambda each: each[0])[1]
        return TextFinding(what=what, cause=best.cause, says=best.says, fix=FIXES[best.cause], by="log-probabilities")


def _right(what: str) -> TextFinding:
    return TextFinding(what=what, cause=None)


def _by_ids(what: str, answer: TextAnswer, candidates: Sequence[Candidate], patient: Patient) -> TextFinding:
    assert answer.server_ids is not None
    for candidate in candidates:
        if candidate.ids == tuple(answer.server_ids):
            return TextFinding(what=what, cause=candidate.cause, says=candidate.says, fix=FIXES[candidate.cause])
    theirs, ours = answer.server_ids, answer.expected
    first = next((n for n, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
    first = min(len(theirs), len(ours)) if first is None else first
    says = (
        f"the server makes {len(theirs)} tokens of the prompt, the tokenizer of the model {len(ours)}; from token "
        f"{first} on, the server has {_shown(theirs[first:], patient)} instead of {_shown(ours[first:], patient)}"
    )
    cause = TOKENIZER if isinstance(answer.asked, str) else TEMPLATE
    return TextFinding(what=what, cause=cause, says=says, fix=FIXES[cause])


def _shown(ids: Sequence[int], patient: Patient) -> str:
    known = [token for token in ids[:4] if token < patient.vocabulary]
    return f"{list(ids[:4])} ({patient.tokenizer.decode(known)!r})"
