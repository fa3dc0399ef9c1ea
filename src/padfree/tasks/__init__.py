"""Tasks: what each training command reads, minimises and measures. One file per command.

    sft dpo kto reward distill rl     `Task`: data reader, loss, evaluation, and preparation of a batch
    task                              the interface of a task, and the models that it may use
    reading, micro_batch_loss, measures, batch_advantages    parts that several tasks share

The parts of a task that do not need torch, such as its settings and help text, are in `TaskSettings`
(`padfree.config.loss_settings`). `task_of` finds a task by the name of its command.
"""

from padfree.tasks.task import Task, task_of

__all__ = ["Task", "task_of"]
