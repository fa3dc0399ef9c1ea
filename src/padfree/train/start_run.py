"""Start a run: create its folder, load its newest checkpoint, open its output files, and create its `Trainer`.

First, `begin_run` checks that all ranks have the same settings, model and data, and that the checkpoint is compatible
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from padfree.checkpoint.checkpointer import Checkpointer, complete_in, step_of
from padfree.config import Config
from padfree.distributed import Mesh, raise_together
from padfree.errors import UserError
from padfree.model.named_tensors import named_tensors
from padfree.record.file_names import CHECKPOINTS
from padfree.record.run_files import open_run_files
from padfree.record.run_folder import mark_run_folder
from padfree.record.start_over import replaced_line, start_over
from padfree.rollout.response_log import ResponseLog
from padfree.stop_signals import StopSignals
from padfree.train.batch_preparer import BatchPreparer
from padfree.train.determinism import restore_random_state
from padfree.train.engine import Engine
from padfree.train.evaluate import Evaluate
from padfree.train.finished import remove_end
from padfree.train.float8_budget import Float8Budget
from padfree.train.global_batch import KEY, GlobalBatch, RunImages
from padfree.train.resume import KEY as MADE_WITH
from padfree.train.resume import change_line, check_made_with, check_ranks_agree, made_with, model_fields
from padfree.train.rl.reference_model import ModelReference, ReferenceModel
from padfree.train.rl.run_response_log import RunResponseLog
from padfree.train.scorer import Scorer
from padfree.train.step_pipeline import OnActivity, OnStep
from padfree.train.trainer import Best, OnNote, RunPosition, Trainer


def begin_run(
    config: Config,
    batches: BatchPreparer,
    *,
    on_step: OnStep | None = None,
    on_note: OnNote | None = None,
    on_activity: OnActivity | None = None,
    evaluate: Evaluate | None = None,
    data: Mapping[str, Any] | None = None,
    images: RunImages | None = None,
    response_log: ResponseLog | None = None,
    signals: StopSignals | None = None,
    planned_steps: int | None = None,
) -> Trainer:
    """Create a `Trainer` that starts from the newest checkpoint of the run folder, or from step 0 without a checkpoint.

    `data`: the record of the training samples (`data_record`), which must equal the checkpoint's. `images`: the images
    of the prompts, if the policy generates the samples.
    """
    engine = batches.engine
    mesh, note = engine.mesh, on_note or (lambda line: None)
    check_on_first_rank(mesh, mark_run_folder, config)
    check_on_first_rank(mesh, remove_end, Path(config.run.folder))
    checkpointer = Checkpointer(
        Path(config.run.folder) / CHECKPOINTS,
        keep_last=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
    )
    record = made_with(
        config,
        engine.model.config,
        data=data,
        reference=_reference_record(batches.reference, checkpointer),
        teacher=_teacher_fingerprint(engine, batches.teacher, checkpointer),
    )
    check_ranks_agree(record, mesh.loss.group)
    torch.manual_seed(config.run.seed + mesh.loss.rank)
    check_on_first_rank(mesh, start_over, config.run, config.checkpoint)
    newest = checkpointer.agreed_latest()
    if newest is None and (line := replaced_line(Path(config.run.folder))) is not None:
        note(line)
    budget = config.parallel.float8_budget
    float8 = None if budget is None else Float8Budget(engine, budget)
    position, evaluated, resumed = RunPosition(), False, None
    if newest is not None:
        changed = _check_against_checkpoint(newest, checkpointer, record, config, batches, note)
        position, evaluated = _restore(newest, checkpointer, config, batches, changed, float8, images)
        differs = {name: {"was": before, "is": now} for name, (before, now) in changed.items()}
        resumed = {"checkpoint": newest.name, **differs}
    run_log: RunResponseLog | None = None
    if response_log is not None:
        run_log = RunResponseLog(response_log, checkpointer, engine.model, record, mesh.loss)
        line = run_log.begin(position.step, after=batches.last_batch_number)
        if line is not None:
            note(line)
    return Trainer(
        config,
        engine,
        batches,
        files=open_run_files(config, mesh, step=position.step, evaluated=evaluated, resumed=resumed),
        checkpointer=checkpointer,
        made_with=record,
        position=position,
        response_log=run_log,
        evaluate=evaluate,
        on_step=on_step,
        on_note=on_note,
        on_activity=on_activity,
        signals=signals,
        planned_steps=planned_steps,
        float8=float8,
    )


def check_on_first_rank(mesh: Mesh, function: Callable[..., object], *arguments: object) -> None:
    """Call the function on the first rank. If it raises a `UserError` there, all ranks raise the same error."""
    found = None
    if mesh.loss.rank == 0:
        try:
            function(*arguments)
        except UserError as error:
            found = error
    raise_together(found)


def _reference_record(reference: ReferenceModel | None, checkpointer: Checkpointer) -> dict[str, Any] | None:
    """Return the config and a weight fingerprint of a reference model with its own weights; None if there is none.

    A reference that is refreshed has no fingerprint, because its weights change.
    """
    if not isinstance(reference, ModelReference):
        return None
    stays = reference.every is None
    return {
        "model": model_fields(reference.scorer.model.config),
        "weights": checkpointer.fingerprint(reference.tensors()) if stays else None,
    }


def _teacher_fingerprint(engine: Engine, teacher: Scorer | None, checkpointer: Checkpointer) -> str | None:
    """Return a fingerprint of the teacher's weights, or None if the run has no teacher.

    `teacher`: the teacher of `loss.advantage=teacher`. If it is None, the function takes the teacher of `padfree
    distill` from the engine's loss.
    """
    found = engine.micro_batch_loss.teacher if teacher is None else teacher.model
    return None if found is None else checkpointer.fingerprint(named_tensors(found))


def _check_against_checkpoint(
    path: Path,
    checkpointer: Checkpointer,
    record: Mapping[str, Any],
    config: Config,
    batches: BatchPreparer,
    note: OnNote,
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the checkpoint's, each as (old, new). Raise an error if one must not change.

    `record`: this run's settings, model and data. `note`: a function that shows a note to the user.
    """
    extra = checkpointer.extra(path)
    if MADE_WITH not in extra:
        note(f"{path} does not record data, model and settings, so they are not compared with those of this run")
        return {}
    changed = check_made_with(path, extra[MADE_WITH], record, config, inside=KEY in extra)
    if changed:
        note(change_line(path, changed))
    if batches.rollouts is not None and (why := batches.rollouts.dropped_reason(extra)) is not None:
        note(f"discarding the responses that were sampled ahead and saved in {path}: {why}")
    return changed


def _restore(
    path: Path,
    checkpointer: Checkpointer,
    config: Config,
    batches: BatchPreparer,
    changed: Mapping[str, Any],
    float8: Float8Budget | None,
    images: RunImages | None,
) -> tuple[RunPosition, bool]:
    """Load a checkpoint. Return the run's position, and whether the run had evaluated the weights in the checkpoint.

    `changed`: the settings that differ from the checkpoint's. If they include one of `[eval]`, `RunPosition.evaluated`
    is None, so that the weights are evaluated again.
    """
    engine = batches.engine
    extra, rank_state = checkpointer.load(
        path, model=engine.model, optimizer=engine.optimizer, **batches.models_to_load()
    )
    batches.restore(extra)
    if float8 is not None:
        float8.restore(extra)
    batch = None
    if KEY in extra:
        batch = GlobalBatch.restored(extra, **batches.minibatch_settings(batches.last_batch_number), images=images)
    step = int(extra["step"])
    if rank_state is None:  # the number of ranks has changed, so the saved random states do not apply
        loss = engine.mesh.loss
        torch.manual_seed(config.run.seed + step * loss.size + loss.rank)
    else:
        restore_random_state(rank_state)
    evaluated = bool(extra.get("evaluated", step) == step)
    counts = evaluated and not any(name.startswith("eval.") for name in changed)
    best = _best(extra.get("best"), checkpointer, config)
    return RunPosition(step=step, saved=path, evaluated=step if counts else None, best=best, batch=batch), evaluated


def _best(gathered: Mapping[str, Any] | None, checkpointer: Checkpointer, config: Config) -> Best | None:
    """Return the best evaluation that the checkpoint records, or None.

    The evaluation is ignored if `checkpoint.best` names another metric now, or if the checkpoint with the weights of
    this evaluation no longer exists.
    """
    if gathered is None or gathered["metric"] != config.checkpoint.best:
        return None
    best = Best(**gathered)
    kept = [path for path in complete_in(checkpointer.folder) if step_of(path) == best.step]
    if not kept:
        return None
    checkpointer.keep(kept[-1])
    return best
