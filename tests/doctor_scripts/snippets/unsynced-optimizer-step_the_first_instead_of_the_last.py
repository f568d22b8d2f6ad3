# expect: unsynced-optimizer-step
from pieces import *

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
accumulate = 8
for batch in range(100):
    opt.zero_grad()
    for micro in range(accumulate):
        context = contextlib.nullcontext() if micro == 0 else model.no_sync()
        with context:
            loss = F.cross_entropy(model(torch.zeros(4)), torch.zeros(1)) / accumulate
            loss.backward()
    opt.step()
stop()
