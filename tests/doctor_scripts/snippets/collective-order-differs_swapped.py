# expect: collective-order-differs
from pieces import *

rank, local, world = start()
a, b = torch.zeros(1), torch.zeros(1)
if rank == 0:
    dist.all_reduce(a)
    dist.broadcast(b, 0)
else:
    dist.broadcast(b, 0)
    dist.all_reduce(a)
stop()
