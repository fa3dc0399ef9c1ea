"""`padfree demo`: all of padfree on a small scale, in one folder, on two CPU cores, without a network.

    stage     what it does                                                      what it writes to the folder
    data      makes problems with answers, trains a tokenizer, makes a model    data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    trains the first steps with plain transformers on padded batches
    packed    trains the same steps and more, packed; losses must be the same   sft/
    reward    trains with RL and in-process rollouts                            rl/
    gpu       on a GPU, if any: trains a larger model, padded and packed        gpu/
    report    shows the runs in sft/ and rl/ on one page                        report.html

All stages except gpu run on the CPU, which is as fast as a GPU for so small a model.

`padfree demo --real MODEL --data FILE` trains a real model with SFT and GRPO instead. All files are then in real/:

    rows      splits the first rows of FILE: rows to train on, held-out rows    train.jsonl, test.jsonl
    before    shows answers of the model and its accuracy on the held-out rows
    tuned     trains a few steps with SFT, then repeats "before"                sft/
    rewarded  trains a few more steps with GRPO, then repeats "before"          rl/
    page      shows the runs in sft/ and rl/ on one page                        report.html

FILE has one JSON object per line, with `question` and `answer` as in GSM8K, or with `prompt` and `response`. Answers
end in a number after hashes, such as `#### 42`. A few steps teach a small model this form, but hardly any arithmetic.

`demo.json` holds the results of the finished stages. With `--resume`, the demo continues after them, and an unfinished
training run continues from its checkpoint.

The modules of this package:

run_demo       the command: its options, and the loop over stages
demo_folder    Demo: the folder, the results of finished stages, the console
stages         the stages
real_stages    the stages with --real
"""
