# expect: eval-padded-duplicates
from pieces import *


@torch.no_grad()
def accuracy(model, loader):
    right = torch.zeros(1)
    for x, y in loader:
        right += (model(x).argmax(-1) == y).sum()
    dist.all_reduce(right)
    return right.item() / 1001


rank, local, world = start()
held = tud.TensorDataset(torch.zeros(1001, 4), torch.zeros(1001))
loader = tud.DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False))
print(rank, accuracy(Net(), loader))
stop()
