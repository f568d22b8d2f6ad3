"""Fault-tolerant training in the style of an elastic job: snapshots, resume on all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from trainer import Trainer


class Noise(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


def load_train_objs():
    torch.manual_seed(42)
    train_set = Noise(128)
    model = torch.nn.Linear(20, 1)
    return train_set, model, torch.optim.SGD(model.parameters(), lr=1e-3)


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def main(save_every, total_epochs, batch_size, snapshot_path):
    dist.init_process_group(backend="gloo")
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size // dist.get_world_size())
    Trainer(model, train_data, optimizer, save_every, snapshot_path).train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total-epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--snapshot", default="snapshot.pt")
    args = parser.parse_args()
    main(args.save_every, args.total_epochs, args.batch_size, args.snapshot)
