# expect: clean
from pieces import *
import socket

machines = ["a", "b"]


def train(rank, size):
    model = DistributedDataParallel(Net())
    if rank == 0:
        torch.save(model.module.state_dict(), "last.pt")


def start_process(rank, size, function):
    dist.init_process_group("gloo", init_method="file:///shared/meeting", rank=rank, world_size=size)
    function(rank, size)
    stop()


if __name__ == "__main__":
    rank = machines.index(str(socket.gethostname()))
    torch.multiprocessing.Process(target=start_process, args=(rank, len(machines), train)).start()
