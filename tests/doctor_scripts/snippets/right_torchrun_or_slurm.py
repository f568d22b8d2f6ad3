# expect: clean
from pieces import *

rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
world = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
torch.cuda.set_device(local)
if world > 1:
    dist.init_process_group("nccl")
model = Net().cuda()
if world > 1:
    model = DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    optimizer.zero_grad()
    model(torch.zeros(2, 4).cuda()).sum().backward()
    optimizer.step()
if world > 1:
    stop()
