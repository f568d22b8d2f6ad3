# expect: clean
from pieces import *

class Options:
    local_rank = None


options = Options()
env = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
options.rank, options.local_rank = int(env["RANK"]), int(env["LOCAL_RANK"])
dist.init_process_group("nccl")
torch.cuda.set_device(options.local_rank)
model = DistributedDataParallel(Net().cuda(), device_ids=[options.local_rank])
if options.rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
stop()
