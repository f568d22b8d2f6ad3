# expect: missing-set-epoch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {"epochs": 3, "batch": 4, "optim": {"lr": 0.05, "momentum": 0.9}}


def build_loaders(cfg):
    loaders = {}
    for split, n in (("train", 64), ("val", 32)):
        data = TensorDataset(torch.randn(n, 8), torch.randn(n, 1))
        sampler = DistributedSampler(data, shuffle=split == "train")
        loaders[split] = DataLoader(data, batch_size=cfg["batch"], sampler=sampler)
    return loaders


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        self.loaders = build_loaders(cfg)
        self.model = DDP(nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), **cfg["optim"])

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.loaders["val"].sampler.set_epoch(epoch)
            for x, y in self.loaders["train"]:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Experiment(CONFIG).fit()
    dist.destroy_process_group()
