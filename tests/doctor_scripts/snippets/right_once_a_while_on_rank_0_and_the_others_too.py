# expect: clean
from pieces import *

rank, local, world = start()
total = torch.zeros(1)
for step in range(400):
    if step % 50 == 0 and rank == 0:
        print("all ranks meet now")
        dist.barrier()
    elif step % 50 == 0:
        dist.barrier()
    if step % 100 == 99 and rank == 0:
        dist.barrier()
    elif step % 100 == 99:
        dist.barrier()
    if step > 4 and rank == 0:
        dist.barrier()
    else:
        dist.barrier()
    if not (step % 50 or rank):
        torch.save(total, "total.pt")
    dist.all_reduce(total)
stop()
