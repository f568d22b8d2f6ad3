# expect: clean
from pieces import *

rank, local, world = start()
net = Net()
net.load_state_dict(torch.load("pretrained.pt"))
model = DistributedDataParallel(net.cuda(), device_ids=[local])
if rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
stop()
