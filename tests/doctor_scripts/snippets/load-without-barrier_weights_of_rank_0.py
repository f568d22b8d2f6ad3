# expect: load-without-barrier
from pieces import *

rank, local, world = start()
net = Net()
path = "/tmp/start.pt"
if rank == 0:
    torch.save(net.state_dict(), path)
net.load_state_dict(torch.load(path, map_location="cpu"))
model = DistributedDataParallel(net.to(local))
stop()
