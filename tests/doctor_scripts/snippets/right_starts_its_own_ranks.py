# expect: clean
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)


def demo(rank, world):
    setup(rank, world)
    model = DDP(nn.Linear(10, 5).to(rank), device_ids=[rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        opt.zero_grad()
        nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5).to(rank)).backward()
        opt.step()
    path = os.path.join("/tmp", "model.checkpoint")
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}))
    dist.destroy_process_group()


if __name__ == "__main__":
    world = torch.cuda.device_count()
    mp.spawn(demo, args=(world,), nprocs=world, join=True)
