# expect: clean
from pieces import *

import subprocess

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
os.environ["MASTER_ADDR"] = subprocess.getoutput("scontrol show hostnames").split()[0]
os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("nccl", rank=rank, world_size=world)
local = rank % torch.cuda.device_count()
torch.cuda.set_device(local)
model = DistributedDataParallel(Net().to(local), device_ids=[local])
stop()
