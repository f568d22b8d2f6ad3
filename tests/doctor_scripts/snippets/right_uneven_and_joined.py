# expect: clean
from pieces import *

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
with model.join():
    for index in range(100 + rank):
        opt.zero_grad()
        model(torch.zeros(4)).sum().backward()
        opt.step()
stop()
