# expect: clean
from pieces import *

from graphs import Neighbours

rank, local, world = start()
nodes = torch.load("mask.pt", map_location="cpu").nonzero().view(-1)
nodes = nodes.split(-(-nodes.size(0) // world))[rank] if world > 1 else nodes
loader = Neighbours(input_nodes=nodes, batch_size=8, drop_last=True)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])
for images in loader:
    model(images.cuda()).sum().backward()
stop()
