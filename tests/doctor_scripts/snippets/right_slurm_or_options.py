# expect: clean
from pieces import *

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", type=int, default=-1)
parser.add_argument("--rank", type=int, default=-1)
options = parser.parse_args()
if options.world_size == -1 and "SLURM_NPROCS" in os.environ:
    options.world_size = int(os.environ["SLURM_NPROCS"])
    options.rank = int(os.environ["SLURM_PROCID"])
elif options.rank == -1:
    options.rank = int(os.environ["RANK"])
    options.world_size = max(options.world_size, int(os.environ.get("SLURM_NTASKS", 1)))
torch.cuda.set_device(options.rank % 8)
model = Net().cuda()
if options.world_size > 1:
    dist.init_process_group("nccl", rank=options.rank, world_size=options.world_size)
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    optimizer.zero_grad()
    model(torch.zeros(2, 4).cuda()).sum().backward()
    optimizer.step()
if options.world_size > 1:
    stop()
