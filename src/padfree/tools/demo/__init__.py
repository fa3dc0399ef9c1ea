"""`padfree demo`: all of padfree on a small scale, in one folder, on two CPU cores, without a network.

    stage     does                                                              writes into the folder
    data      makes problems with answers, trains a tokenizer, makes a model    data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    the first steps of fine-tuning with plain transformers, padded
    packed    the same steps and more, packed: the losses must be the same      sft/
    reward    RL with in-process rollouts                                       rl/
    gpu       if there is a GPU: a larger model on it, padded and packed        gpu/
    report    both runs on one page                                             report.html

The trained model is so small that a CPU is as fast as a GPU, so its runs always use the CPU. The gpu stage shows the
gain of packing on a GPU with a few steps of a larger model.

`padfree demo --real MODEL --data FILE` trains a real model with SFT and GRPO instead. It writes everything into real/:

    rows      takes the first rows of the file for training, and holds out some train.jsonl, test.jsonl
    before    answers of the model, and its accuracy on the held-out rows
    tuned     a few steps of SFT, then the same questions again                 sft/
    rewarded  a few more steps of GRPO, then the same questions again           rl/
    page      both runs on one page                                             report.html

The file has one JSON object per line, with `question` and `answer` as in GSM8K, or with `prompt` and `response`.
Answers end in `#### 42`. A few steps teach a small model the form of an answer but hardly any arithmetic; for that, run
the recipes in `recipes/` for longer.

`demo.json` holds the results of all finished stages. With `--resume` the demo continues with the next stage, and an
unfinished training run continues from its checkpoint.

run_demo       the command: its options, and the loop over stages
demo_folder    Demo: the folder, the results of finished stages, the console
stages         the stages
real_stages    the stages with --real
"""
