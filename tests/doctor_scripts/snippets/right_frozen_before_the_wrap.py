# expect: clean
from pieces import *

rank, local, world = start()
net = Net()
for p in net.body.parameters():
    p.requires_grad = False
net.head = nn.Linear(8, 100)
model = DistributedDataParallel(net.to(local))
opt = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
