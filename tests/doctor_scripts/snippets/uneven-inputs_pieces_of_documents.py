# expect: uneven-inputs
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Windows:
    def __init__(self, texts, length):
        tokens = [ord(c) % 50 for text in texts for c in text]
        usable = len(tokens) // length * length
        self.rows = torch.tensor(tokens[:usable]).view(-1, length)

    def __iter__(self):
        yield from self.rows.split(4)


def main():
    dist.init_process_group("gloo")
    rng = random.Random(0)
    texts = ["x" * rng.randint(20, 200) for _ in range(20)]
    model = DDP(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = texts[dist.get_rank() :: dist.get_world_size()]
    for _ in range(2):
        for ids in Windows(mine, 16):
            logits = model(ids[:, :-1])
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
