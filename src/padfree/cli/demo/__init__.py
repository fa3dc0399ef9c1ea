"""`padfree demo`: the whole job at a small size, in one folder, on two CPU cores, without a network.

    stage     does                                                              leaves in the folder
    data      writes problems with answers, trains a tokenizer, makes a model   data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    the first steps of fine-tuning, plain transformers, padded rows
    packed    the same steps and more, packed: the losses must be the same      sft/
    reward    RL with rollouts written in the process                           rl/
    gpu       where there is one: a larger model on it, padded and packed       gpu/
    report    both runs on one page                                             report.html

The model that learns is so small that a CPU is as fast as a GPU for it, and its runs are on the CPU everywhere. What a
GPU gains from packing is shown by a few steps of a model that is worth one.

What a stage found is in `demo.json` once it is done. With `--resume` the demo goes on behind the last of these, and the
two training runs go on from their checkpoints.

With `--real` a model and data of the user's go through SFT and GRPO instead (`real`).

    command     the command line, and the stages in their order
    folder      the folder, its state, and what is shown meanwhile
    recipes     sizes, and the settings of the three runs
    data        problems, tokenizer, model
    stages      what each stage does
    padded      the same steps by plain transformers code, and the comparison
    table       the result
    real        the stages of a demo with a real model
"""

from padfree.cli.demo.command import add_command

__all__ = ["add_command"]
