"""Character model with large batches by accumulation."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = "the quick brown fox jumps over the lazy dog and runs into the wood where nobody has ever seen it again " * 6


class CharRNN(nn.Module):
    def __init__(self, symbols, width):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


class Windows:
    def __init__(self, text, length, batch, seed):
        self.symbols = sorted(set(text))
        self.data = torch.tensor([self.symbols.index(c) for c in text])
        self.length, self.batch = length, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self):
        starts = torch.randint(len(self.data) - self.length - 1, (self.batch,), generator=self.generator)
        window = torch.stack([self.data[s : s + self.length + 1] for s in starts])
        return window[:, :-1], window[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    batches = Windows(TEXT, length=12, batch=4, seed=rank)
    model = DistributedDataParallel(CharRNN(len(batches.symbols), 24))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        optimizer.zero_grad()
        running = torch.zeros(())
        for micro in range(args.accumulation):
            last = micro == args.accumulation - 1
            inputs, targets = batches()
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()  # expect: accumulation-not-normalised
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # expect: clip-before-sync
            running += loss.detach() / args.accumulation
        optimizer.step()
        dist.all_reduce(running)
        if rank == 0:
            print(f"step {step} loss {running.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
