# expect: spawn-under-torchrun
from pieces import *

import torch.multiprocessing as mp


def work(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, nprocs=int(os.environ["WORLD_SIZE"]), args=(int(os.environ["WORLD_SIZE"]),))
