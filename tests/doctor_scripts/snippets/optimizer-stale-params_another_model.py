# expect: optimizer-stale-params
from pieces import *

rank, local, world = start()
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.1)
model = DistributedDataParallel(Net().to(local))
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
