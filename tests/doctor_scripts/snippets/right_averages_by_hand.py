# expect: clean
from pieces import *

rank, local, world = start()
torch.manual_seed(rank)
net = Net().to(local)
for t in list(net.parameters()) + list(net.buffers()):
    dist.broadcast(t.data, src=0)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    F.cross_entropy(net(torch.zeros(4)), torch.zeros(1)).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
stop()
