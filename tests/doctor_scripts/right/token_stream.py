"""One pass over a stream of sentences of unequal length; every token counts the same, on whatever rank it lies."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

PAD = 0


class Sentences(IterableDataset):
    def __init__(self, count, rank, world_size):
        super().__init__()
        self.count, self.rank, self.world_size = count, rank, world_size

    def _all(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(self.count):
            length = int(torch.randint(3, 10, (), generator=generator))
            yield torch.randint(1, 30, (length,), generator=generator)

    def __iter__(self):
        info = get_worker_info()
        parts = 1 if info is None else info.num_workers
        part = 0 if info is None else info.id
        return itertools.islice(self._all(), self.rank * parts + part, None, self.world_size * parts)


def collate(sentences):
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=PAD)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 30)

    def forward(self, words):
        return self.out(self.rnn(self.embed(words))[0])


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(Sentences(args.sentences, rank, world_size), batch_size=args.batch_size, collate_fn=collate)
    for step, words in enumerate(loader):
        inputs, targets = words[:, :-1], words[:, 1:]
        tokens = (targets != PAD).sum()
        dist.all_reduce(tokens)
        summed = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        loss = summed * world_size / tokens
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.log_every == 0:
            shown = loss.detach() / world_size
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step}: {shown.item():.3f} nats a token, {int(tokens)} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--log-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
