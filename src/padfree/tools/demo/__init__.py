"""`padfree demo`: all of padfree on a small scale, in one folder, on a CPU, without a network.

The demo plans an epoch, trains a tiny model with SFT and RL, and writes a report. With `--real MODEL --data FILE`, it
trains a real model instead. `demo.json` holds the results of finished stages, so that `--resume` can continue after
them.

run_demo       the command: its options, and the loop over stages
demo_folder    Demo: the folder, the results of finished stages, the console
stages         the stages
real_stages    the stages with --real
"""
