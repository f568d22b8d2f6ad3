# expect: rank-conditional-collective
from pieces import *

rank, local, world = start()
for step in range(400):
    if not (step % 50 == 0 and rank == 0) or step < 10:
        continue
    dist.broadcast(torch.zeros(1), src=0)
stop()
