# expect: clean
from pieces import *

rank, local, world = start()
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(local)
model = DistributedDataParallel(net, broadcast_buffers=False)
if rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
stop()
