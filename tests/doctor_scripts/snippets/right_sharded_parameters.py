# expect: clean
from pieces import *

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

rank, local, world = start()
model = FSDP(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
