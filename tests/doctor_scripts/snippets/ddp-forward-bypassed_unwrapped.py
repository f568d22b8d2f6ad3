# expect: ddp-forward-bypassed
from pieces import *


def unwrap(model):
    return model.module if hasattr(model, "module") else model


rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    unwrap(model)(torch.zeros(4)).sum().backward()
    opt.step()
stop()
