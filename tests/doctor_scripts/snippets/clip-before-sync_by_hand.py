# expect: clip-before-sync
from pieces import *

rank, local, world = start()
net = Net().to(local)
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(10):
    opt.zero_grad()
    F.cross_entropy(net(torch.zeros(4)), torch.zeros(1)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    opt.step()
stop()
