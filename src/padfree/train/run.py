"""A whole run, from its settings to the exported model.

settings -> preflight      checks the settings and the data before anything is written or loaded; on a GPU, a thread
                           imports the packages of the first step meanwhile
         -> resolve_auto   chooses values for `auto` settings
         -> begin_run      engine, reference, sampler, batches
         -> Trainer.run
         -> export
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from padfree.checkpoint.checkpointer import Checkpointer, latest_in
from padfree.checkpoint.manifest import base_tensors
from padfree.config import Config
from padfree.data import RolloutDataSettings, StoredSamples
from padfree.data.chat_renderer import chat_renderer
from padfree.data.prepare import Progress
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.images import Image
from padfree.packing.context_sizes import context_sizes
from padfree.record.file_names import BEST_MODEL, CHECKPOINTS, CRITIC_MODEL, MODEL, RESPONSE_LOG, ROWS
from padfree.record.run_folder import held_run_folder, writing
from padfree.record.start_over import remove_replaced
from padfree.record.trackers import require_trackers
from padfree.rollout import Prompt, stop_tokens
from padfree.rollout.collect.collector import Collector, OnSampling
from padfree.rollout.engines import make_sampler
from padfree.rollout.response_log import ResponseLog
from padfree.rollout.token_ids import vocabulary_of
from padfree.stop_signals import StopSignals
from padfree.tasks.reading import Samples, TrainingData, text_settings
from padfree.train.batch_preparer import BatchPreparer
from padfree.train.batcher import make_batcher, planned_steps
from padfree.train.determinism import deterministic
from padfree.train.disk import check_disk
from padfree.train.early_imports import EarlyImports, first_step_modules
from padfree.train.engine import Engine
from padfree.train.evaluate import make_evaluation
from padfree.train.finished import check_can_continue, finished_step
from padfree.train.global_batch import RunImages
from padfree.train.precomputed import ReferencedSamples, with_reference
from padfree.train.preflight import Preflight, check_folder_usable, preflight
from padfree.train.resolve_auto import resolve_auto_on
from padfree.train.resume import data_record
from padfree.train.rl.reference_model import ReferenceModel
from padfree.train.rl.sampler_agreement import SamplerAgreement
from padfree.train.setup import (
    build_critic,
    build_engine,
    build_reference,
    build_reward_model,
    build_teacher_scorer,
    export,
    export_critic,
    export_dtype,
)
from padfree.train.shared_turns import copied_keys
from padfree.train.start_run import begin_run, check_on_first_rank
from padfree.train.step_pipeline import OnActivity, OnStep
from padfree.train.trainer import AFTER_SIGNAL, OnNote, RunResult
from padfree.train.training_data import image_settings, image_share, longest_of


def train(
    config: Config,
    *,
    on_step: OnStep | None = None,
    on_tokenising: Progress | None = None,
    on_note: OnNote | None = None,
    on_sampling: OnSampling | None = None,
    on_activity: OnActivity | None = None,
    signals: StopSignals | None = None,
) -> RunResult:
    """Run a whole training in this process, and return how it ended. Every process that torchrun starts calls this.

    The callbacks `on_...` show the progress (see their types). `signals`: installed signal handlers; by default,
    `train` installs its own.
    """
    report_activity: OnActivity = on_activity or (lambda name, done, total: None)
    require_trackers(config.track)
    report_activity("waiting for the other processes" if "WORLD_SIZE" in os.environ else "starting", 0, 0)
    with (
        deterministic(config.run.deterministic),
        distributed(device=config.run.device, timeout=config.run.timeout) as device,
    ):
        mesh = mesh_of(config, device)
        report_activity("reading model and data", 0, 0)
        with EarlyImports(first_step_modules(config.model, config.parallel, mesh.device.type)) as imports:
            # Nothing is written before all checks have passed. Quick checks come first, because reading data is slow.
            check_on_first_rank(mesh, check_folder_usable, config)
            preflight_result = preflight(
                config, processes=mesh.loss.size, device_type=mesh.device.type, progress=on_tokenising
            )
            finished = _finished(config, mesh, preflight_result)
            if finished is not None:
                check_on_first_rank(mesh, remove_replaced, Path(config.run.folder))  # if the run was killed at its end
                newest = latest_in(Path(config.run.folder) / CHECKPOINTS)
                return RunResult(step=finished, stopped=False, checkpoint=newest, was_finished=True)
            check_on_first_rank(mesh, check_can_continue, config.run, config.checkpoint)
            check_on_first_rank(mesh, partial(check_disk, model=preflight_result.model), config)
            with held_run_folder(config), nullcontext(signals) if signals is not None else StopSignals() as listening:
                return _train(
                    config,
                    mesh,
                    preflight_result,
                    imports,
                    on_step=on_step,
                    on_note=on_note,
                    on_sampling=on_sampling,
                    report_activity=report_activity,
                    signals=listening,
                )


def _finished(config: Config, mesh: Mesh, preflight_result: Preflight) -> int | None:
    """Return the number of steps of the run if it is finished, or None. All ranks must call this; rank 0 checks."""
    gathered: list[int | None] = [None] * mesh.loss.size
    found = finished_step(config, preflight_result.source) if mesh.loss.rank == 0 else None
    dist.all_gather_object(gathered, found, group=mesh.loss.group)
    return gathered[0]


def _train(
    config: Config,
    mesh: Mesh,
    preflight_result: Preflight,
    imports: EarlyImports,
    *,
    on_step: OnStep | None,
    on_note: OnNote | None,
    on_sampling: OnSampling | None,
    report_activity: OnActivity,
    signals: StopSignals,
) -> RunResult:
    tokenizer, source = preflight_result.tokenizer, preflight_result.source
    resolved = resolve_auto_on(config, mesh, **_memory_facts(config, preflight_result, mesh.loss.size))
    config = resolved.config
    if on_note is not None:
        for line in (*preflight_result.notes, *resolved.lines()):
            on_note(line)
    imports.wait()
    report_activity("loading the model", 0, 0)
    engine = build_engine(config, mesh, tokenizer)
    dtype = critic_dtype = export_dtype(config)  # read now, because the model's files may be deleted during the run
    if config.critic.path is not None:
        critic_dtype = export_dtype(config, config.critic.path)
    report_activity("loading the other models, or starting the sampler", 0, 0)
    reference = build_reference(config, mesh, engine)
    response_log = None
    if config.rollout.source is not None and not config.rollout.has_episodes:  # a resumed run repeats whole episodes
        response_log = ResponseLog(Path(config.run.folder) / RESPONSE_LOG, mesh.loss.rank)
    options: dict[str, Any] = {} if on_sampling is None else {"on_sampling": on_sampling}
    collector = _collector(config, mesh, engine, tokenizer, source, response_log=response_log, **options)
    with nullcontext() if collector is None else closing(collector):
        evaluation = make_evaluation(
            config.eval,
            config.loss,
            engine,
            preflight_result.held_out,
            collector,
            _pair_reference(config, reference),
            report_activity,
            seed=config.run.seed,
        )
        samples: Samples = source.samples
        if config.reference.precompute:
            samples, reference = _precomputed(config, mesh, source.samples, reference), None
        batches = BatchPreparer(
            engine,
            make_batcher(config, samples, source.parts),
            loss=config.loss,
            data=config.data,
            rollout=config.rollout,
            seed=config.run.seed,
            reference=reference,
            teacher=build_teacher_scorer(config, mesh),
            critic=build_critic(config, mesh),
            rollouts=collector,
            end_tokens=() if collector is None else stop_tokens(tokenizer, engine.model),
        )
        trainer = begin_run(
            config,
            batches,
            on_step=SamplerAgreement(on_step, on_note) if config.rollout.exact is True else on_step,
            on_note=on_note,
            on_activity=report_activity,
            evaluate=evaluation,
            data=data_record(source.samples, source.day),
            images=RunImages(
                {image.digest: image for image in _prompt_images(source.samples)},
                image_settings(config.model, config.data),
            ),
            response_log=response_log,
            signals=signals,
            planned_steps=planned_steps(config, source),
        )
        for line in preflight_result.notes:
            trainer.events.write("note", step=trainer.step, text=line)
        if resolved.reasons:
            trainer.events.write("resolved_auto", step=trainer.step, **resolved.fields())
        if mesh.loss.rank == 0:
            with writing(trainer.folder):
                source.report.write(trainer.folder / ROWS)  # names every row that was skipped, dropped or truncated
        with signals.deferred(AFTER_SIGNAL):
            result = trainer.run()
    if result.stopped:
        return result
    if config.checkpoint.export:
        with signals.deferred("exports the trained model and ends") if not signals.received else nullcontext():
            report_activity("exporting the model", 0, 0)
            export(config, engine.model, trainer.folder / MODEL, tokenizer, dtype=dtype)
            if trainer.best is not None:
                trainer.load_best()
                export(config, engine.model, trainer.folder / BEST_MODEL, tokenizer, dtype=dtype)
            if trainer.batches.critic is not None:
                export_critic(trainer.batches.critic, trainer.folder / CRITIC_MODEL, tokenizer, dtype=critic_dtype)
            trainer.events.write("export", step=trainer.step)
    check_on_first_rank(mesh, remove_replaced, trainer.folder)
    return result


def evaluate(
    config: Config,
    *,
    on_tokenising: Progress | None = None,
    on_note: OnNote | None = None,
    on_activity: OnActivity | None = None,
) -> dict[str, float]:
    """Evaluate the model at `model.path` as `[eval]` configures, and return the metrics by name.

    Nothing is trained or written. The callbacks report progress, as in `train`.
    """
    config = config.with_held_out_data()
    report_activity: OnActivity = on_activity or (lambda name, done, total: None)
    report_activity("waiting for the other processes" if "WORLD_SIZE" in os.environ else "starting", 0, 0)
    with (
        deterministic(config.run.deterministic),
        distributed(device=config.run.device, timeout=config.run.timeout) as device,
    ):
        mesh = mesh_of(config, device)
        report_activity("reading model and data", 0, 0)
        preflight_result = preflight(
            config, processes=mesh.loss.size, device_type=mesh.device.type, progress=on_tokenising
        )
        resolved = resolve_auto_on(config, mesh, **_memory_facts(config, preflight_result, mesh.loss.size))
        if on_note is not None:
            for line in (*preflight_result.source.notes, *resolved.lines()):
                on_note(line)
        report_activity("loading the model", 0, 0)
        engine = build_engine(resolved.config, mesh, preflight_result.tokenizer)
        collector = _collector(resolved.config, mesh, engine, preflight_result.tokenizer, preflight_result.source)
        with nullcontext() if collector is None else closing(collector):
            reference = _pair_reference(resolved.config, build_reference(resolved.config, mesh, engine))
            measure = make_evaluation(
                config.eval,
                config.loss,
                engine,
                preflight_result.held_out,
                collector,
                reference,
                on_activity,
                seed=config.run.seed,
            )
            assert measure is not None
            return measure(0)


def _pair_reference(config: Config, reference: ReferenceModel | None) -> ReferenceModel | None:
    """Return the reference model if evaluations need it (as for DPO, but not for a KL term), else None."""
    return reference if config.loss.task.has_reference else None


def _precomputed(config: Config, mesh: Mesh, samples: Samples, reference: ReferenceModel | None) -> ReferencedSamples:
    """Return the samples with the log-probabilities of the reference model. The caller can then free the model."""
    assert isinstance(samples, StoredSamples)
    assert reference is not None
    tensors = base_tensors(reference.scorer.model) or reference.tensors()
    fingerprint = Checkpointer(Path(config.run.folder) / CHECKPOINTS).fingerprint(tensors)
    return with_reference(
        samples, reference, fingerprint, mesh, dtype=config.model.dtype, temperature=config.loss.temperature
    )


def _collector(
    config: Config, mesh: Mesh, engine: Engine, tokenizer: Any, source: TrainingData, **options: Any
) -> Collector | None:
    """Return the collector that generates rollouts, or None if the data already holds samples or rollouts.

    `options`: see `Collector`.
    """
    if config.rollout.source is None:
        return None
    prompts = [prompt for prompt in source.samples if isinstance(prompt, Prompt)]
    chat = None
    if config.rollout.has_episodes:
        chat = chat_renderer(tokenizer, RolloutDataSettings(**text_settings(config.data)), day=source.day)
    sampler = make_sampler(config, mesh, engine.model, tokenizer, engine.scorer.logprobs)
    try:
        return Collector(
            config.rollout,
            config.loss,
            config.run,
            mesh,
            sampler,
            tokenizer,
            prompts,
            vocabulary=vocabulary_of(engine.model),
            chat=chat,
            images=image_settings(config.model, config.data) if config.rollout.has_episodes else None,
            reward_model=build_reward_model(config, mesh),
            **options,
        )
    except BaseException:
        sampler.close()  # the sampler may have started server processes
        raise


def _prompt_images(samples: Samples) -> Iterator[Image]:
    """Yield the images of the prompts. A rollout batch that is restored from a checkpoint needs them, because the
    checkpoint does not store them.
    """
    if not isinstance(samples, StoredSamples):
        for sample in samples:
            yield from sample.images


def mesh_of(config: Config, device: torch.device) -> Mesh:
    """Return the mesh of process groups for these settings, over all processes."""
    parallel, world = config.parallel, dist.get_world_size()
    contexts: tuple[int, ...] = ()
    if parallel.context == "auto" and world % parallel.replicate == 0:
        contexts = context_sizes(parallel.most_context(world))
    return make_mesh(
        device,
        context=1 if parallel.context == "auto" else parallel.context,
        replicate=parallel.replicate,
        expert=parallel.expert,
        contexts=contexts,
        timeout=config.run.timeout,
    )


def _memory_facts(config: Config, preflight_result: Preflight, processes: int) -> dict[str, Any]:
    """Return facts about the data for the memory estimate, as keyword arguments of `resolve_auto_on`.

    The docstring of `estimate_memory` explains these arguments.
    """
    samples = preflight_result.source.samples
    longest, shown = longest_of(samples), image_share(config.model, samples)
    if config.rollout.source is not None:
        return {"prompt_tokens": longest, "image_share": shown}
    return {
        "image_share": shown,
        "longest": -(-longest // config.parallel.most_context(processes)),
        "copied_keys": copied_keys(config.batch, config.loss, config.rollout, samples, preflight_result.model),
    }
