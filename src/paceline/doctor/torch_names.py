"""Names that both passes look for: what reading finds in the source, watching hooks in a run. Nothing is imported."""

from __future__ import annotations

from typing import Final

__all__ = ["COLLECTIVES", "LAUNCHER_VARIABLES", "TRACKERS"]

COLLECTIVES: Final[dict[str, tuple[str, ...]]] = {
    line.split()[0]: tuple(line.split()[1:])
    for line in """
all_gather tensor_list tensor group async_op
all_gather_coalesced output_tensor_lists input_tensor_list group async_op
all_gather_into_tensor output_tensor input_tensor group async_op
all_gather_object object_list obj group
all_reduce tensor op group async_op
all_reduce_coalesced tensors op group async_op
all_to_all output_tensor_list input_tensor_list group async_op
all_to_all_single output input output_split_sizes input_split_sizes group async_op
barrier group async_op device_ids
broadcast tensor src group async_op
broadcast_object_list object_list src group device
gather tensor gather_list dst group async_op
gather_object obj object_gather_list dst group
monitored_barrier group timeout wait_all_ranks
reduce tensor dst op group async_op
reduce_scatter output input_list op group async_op
reduce_scatter_tensor output input op group async_op
scatter tensor scatter_list src group async_op
scatter_object_list scatter_object_output_list scatter_object_input_list src group
""".strip().splitlines()
}
"""Of ``torch.distributed``, what all ranks of a group must call; with the names of the parameters."""

TRACKERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("aim", "Run"): (),
    ("clearml", "Task.init"): (),
    ("comet_ml", "Experiment"): (),
    ("mlflow", "start_run"): ("run_id",),
    ("neptune", "init_run"): (),
    ("swanlab", "init"): (),
    ("tensorboardX", "SummaryWriter"): ("logdir", "comment"),
    ("torch.utils.tensorboard", "SummaryWriter"): ("log_dir", "comment"),
    ("wandb", "init"): ("project", "entity", "config"),
}
"""By module and name, what starts a run of an experiment tracker; with the names of the parameters."""

LAUNCHER_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""Of the environment, what torchrun sets for each rank."""
