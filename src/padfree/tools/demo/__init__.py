"""`padfree demo`: all of padfree on a small scale, in one folder, on two CPU cores, without a network.

    stage     what it does                                                      what it writes into the folder
    data      makes problems with answers, trains a tokenizer, makes a model    data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    trains the first steps with plain transformers on padded batches
    packed    trains the same steps and more, packed; losses must be the same   sft/
    reward    trains with RL and in-process rollouts                            rl/
    gpu       on a GPU, if any: trains a larger model, padded and packed        gpu/
    report    shows both CPU runs on one page                                   report.html

The trained model is so small that a CPU is as fast as a GPU, so its runs always use the CPU. The gpu stage shows the
speedup that packing gives on a GPU, with a few steps of a larger model.

`padfree demo --real MODEL --data FILE` trains a real model with SFT and GRPO instead. All files are then in real/:

    rows      splits the first rows of the file: training, held out             train.jsonl, test.jsonl
    before    shows answers of the model and its accuracy on the held-out rows
    tuned     trains a few steps with SFT, then repeats "before"                sft/
    rewarded  trains a few more steps with GRPO, then repeats "before"          rl/
    page      shows both runs on one page                                       report.html

The file has one JSON object per line, with `question` and `answer` as in GSM8K, or with `prompt` and `response`.
Answers end in a number after hashes, such as `#### 42`. A few steps teach a small model this form, but hardly any
arithmetic. To teach arithmetic, run the recipes in `recipes/` for longer.

`demo.json` holds the results of all finished stages. With `--resume` the demo continues with the next stage, and an
unfinished training run continues from its checkpoint.

The modules of this package:

run_demo       the command: its options, and the loop over stages
demo_folder    Demo: the folder, the results of finished stages, the console
stages         the stages
real_stages    the stages with --real
"""
