# expect: clean
from pieces import *

from cluster import init_distributed

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
world_size, rank = init_distributed()
dist.init_process_group("nccl")
model = DistributedDataParallel(Net().cuda())
if rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
stop()
