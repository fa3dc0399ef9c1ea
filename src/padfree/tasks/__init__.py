"""Tasks: what each command of training reads, minimises and measures, one file a command.

    sft dpo kto reward distill rl `Task`: reader, row loss, evaluation, and what a batch needs before its update
    task                              what a task is, and what it may ask
    reading, row_loss, measures, advantages      parts that several tasks share

What is known of a task without torch (its settings, its help line, the size of a group) is its `TaskSettings`
(`padfree.config.loss_settings`). A task is found by the name of its command.
"""

from padfree.tasks.task import Task, task_of

__all__ = ["Task", "task_of"]
