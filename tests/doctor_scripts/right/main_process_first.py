"""Sentiment of short reviews: rank 0 prepares a cache, then the others read it. Every rank passes each barrier once."""

import argparse
import contextlib
import json
import logging
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logger = logging.getLogger("reviews")
GOOD, BAD = ["fine", "lovely", "warm", "clear"], ["dull", "cold", "noisy", "broken"]


@contextlib.contextmanager
def main_process_first(rank):
    """Rank 0 goes first; the others wait until it is done."""
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def write_cache(path):
    chooser = random.Random(13)
    rows = []
    for _ in range(120):
        label = chooser.randrange(2)
        words = [chooser.choice(GOOD if label else BAD) for _ in range(3)] + [chooser.choice(GOOD + BAD)]
        rows.append({"words": words, "label": label})
    with open(path, "w") as file:
        json.dump(rows, file)


class Reviews(Dataset):
    def __init__(self, path):
        with open(path) as file:
            self.rows = json.load(file)
        self.index = {word: n for n, word in enumerate(sorted(GOOD + BAD))}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return torch.tensor([self.index[word] for word in row["words"]]), row["label"]


class Bag(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embed = nn.EmbeddingBag(words, width)
        self.out = nn.Linear(width, 2)

    def forward(self, words):
        return self.out(self.embed(words))


def setup_logging(rank):
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", default="reviews.json")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    setup_logging(rank)
    with main_process_first(rank):
        if not os.path.exists(args.cache):
            write_cache(args.cache)
        dataset = Reviews(args.cache)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(2)
    model = DistributedDataParallel(Bag(len(dataset.index), 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen, correct = torch.zeros(1), torch.zeros(1)
        for words, label in loader:
            logits = model(words)
            loss = nn.functional.cross_entropy(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(label)
            correct += (logits.argmax(1) == label).sum()
        for count in (seen, correct):
            dist.all_reduce(count)
        logger.info("epoch %d: accuracy %.3f", epoch, (correct / seen).item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
