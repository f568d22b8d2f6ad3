# expect: rank-conditional-collective
from pieces import *

rank, local, world = start()
for epoch in range(4):
    if rank != 0:
        continue
    dist.broadcast(torch.zeros(1), src=0)
stop()
