# expect: rendezvous-overridden
from pieces import *


def setup(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29501"
    dist.init_process_group("gloo", rank=rank, world_size=world)


setup(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
stop()
