"""Train with your own loop in plain PyTorch, and four calls of padfree.

    python examples/foreign_loop.py --model Qwen/Qwen3-0.6B --data train.jsonl --output trained

    pack           samples -> packs of at most --max-tokens tokens, without padding
    shard          a pack -> the part that this process computes (here all of it; with a group, a context rank's part)
    hidden_states  the attached model -> [T, D]
    score          [T, D] and the head -> log-probabilities of the labels, without [T, V]

The token weights are normalised over the whole step, so the losses of its packs are simply added.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import padfree
from padfree.data import load_sft
from padfree.model import lm_head_of


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="A training loop in plain PyTorch with padfree.")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--data", required=True, nargs="+", help="JSONL files")
    parser.add_argument("--output", default="trained", help="folder of the trained model (default %(default)s)")
    parser.add_argument("--samples", type=int, default=32, help="samples per step (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens per micro-batch (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default %(default)s)")
    given = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = padfree.attach(AutoModelForCausalLM.from_pretrained(given.model).to(device).train())
    head = lm_head_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    batches = padfree.FixedSizeBatcher(
        load_sft(given.data, tokenizer), batch_size=given.samples, shuffle=True, epochs=given.epochs
    )

    losses: list[float] = []
    for samples in batches:
        total = 0.0
        for batch in padfree.pack(samples, max_tokens=given.max_tokens):
            local = padfree.shard(batch.to(device))
            hidden = padfree.hidden_states(model, local)
            scores = padfree.score(hidden, head, local.labels)
            loss = -(local.weights * scores.logprobs).sum()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {len(losses)}  {len(samples)} samples  loss {total:.4f}")
    model.set_attn_implementation("sdpa")  # detach padfree
    model.save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)
    return losses


if __name__ == "__main__":
    main()
