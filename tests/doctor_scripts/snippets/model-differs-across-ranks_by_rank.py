# expect: model-differs-across-ranks
from pieces import *

rank, local, world = start()
net = Net(width=16 if rank == 0 else 8)
model = DistributedDataParallel(net.to(local))
stop()
