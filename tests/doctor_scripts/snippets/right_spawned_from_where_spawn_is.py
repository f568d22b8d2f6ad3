# expect: clean
from pieces import *

from torch.multiprocessing.spawn import spawn


def train(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world, init_method="tcp://localhost:29500")
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(Net().cuda(), device_ids=[rank])
    if rank == 0:
        torch.save(model.module.state_dict(), "last.pt")
    stop()


if __name__ == "__main__":
    spawn(train, args=(2,), nprocs=2)
