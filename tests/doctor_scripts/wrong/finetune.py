"""Fine-tuning: a stored backbone gets a new head."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, outputs=100):
        super().__init__()
        self.layer1 = nn.Linear(10, 32)
        self.layer2 = nn.Linear(32, 32)
        self.fc = nn.Linear(32, outputs)

    def forward(self, x):
        return self.fc(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


def pretrained(path, rank):
    """Stands for a download that is there already."""
    if rank == 0:
        torch.manual_seed(77)
        torch.save(Backbone().state_dict(), path)
    dist.barrier()
    net = Backbone()
    net.load_state_dict(torch.load(path, weights_only=True))  # expect: load-without-map-location
    return net


def get_device():
    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def main(args):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = get_device()
    net = pretrained(args.weights, rank).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    net.fc = nn.Linear(net.fc.in_features, args.classes).to(device)  # expect: optimizer-stale-params
    model = DDP(net)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 10, generator=generator)
    dataset = TensorDataset(x, x[:, : args.classes].argmax(1))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()  # expect: optimizer-stale-params
    if rank == 0:
        torch.save(model.module.state_dict(), args.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="backbone.pt")
    parser.add_argument("--output", default="finetuned.pt")
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    main(parser.parse_args())
