# expect: module-prefix-checkpoint
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(x)


def save(model, path):
    if dist.get_rank() == 0:
        torch.save({"state": model.state_dict()}, path)
    dist.barrier()


def test(path, data):
    net = Net()
    net.load_state_dict(torch.load(path, map_location="cpu")["state"])
    return net(data[:4][0])


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    save(model, "net.pt")
    test("net.pt", data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
