# expect: uneven-inputs
from pieces import *

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for index in range(rank, 10_001, world):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
