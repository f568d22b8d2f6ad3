# expect: params-changed-after-wrap
from pieces import *

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
model.module.head = nn.Linear(8, 10).to(local)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
