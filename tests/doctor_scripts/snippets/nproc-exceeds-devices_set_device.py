# expect: nproc-exceeds-devices
from pieces import *

dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(gpu)
stop()
