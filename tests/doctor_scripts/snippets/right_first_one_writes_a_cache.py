# expect: clean
from pieces import *

@contextlib.contextmanager
def one_first(rank):
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


rank, local, world = start()
model = DistributedDataParallel(Net().cuda(), device_ids=[local])
with one_first(rank):
    if os.path.exists("cache.pt") is False:
        torch.save([1, 2, 3], "cache.pt")
stop()
