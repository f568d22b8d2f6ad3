# expect: clean
import os, random, time, warnings
import gymnasium as gym
import numpy as np
import torch, torch.distributed as dist
import torch.nn as nn, torch.optim as optim
from dataclasses import dataclass
from torch.distributions.categorical import Categorical
import tyro

@dataclass
class Args:
    seed: int = 1
    total_timesteps: int = 1000000
    lr: float = 2.5e-4
    local_num_envs: int = 8
    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4
    max_grad_norm: float = 0.5
    track: bool = False
    backend: str = "gloo"
    local_rank: int = 0
    world_size: int = 0

class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 64), nn.ReLU())
        self.actor = nn.Linear(64, 2)
        self.critic = nn.Linear(64, 1)
    def get_value(self, x):
        return self.critic(self.network(x))
    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)

if __name__ == "__main__":
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    args = tyro.cli(Args)
    if world_size > 1:
        dist.init_process_group(args.backend, rank=local_rank, world_size=world_size)
    else:
        warnings.warn("Not using distributed mode!")
    run_name = f"{args.seed}__{int(time.time())}"
    writer = None
    if local_rank == 0:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(f"runs/{run_name}")
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(args.local_num_envs)])
    device = torch.device("cpu")
    agent = Agent(envs).to(device)
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    obs = torch.zeros((args.num_steps, args.local_num_envs, 4))
    global_step = 0
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs = torch.Tensor(next_obs)
    for iteration in range(1, 100):
        for step in range(args.num_steps):
            global_step += args.local_num_envs * world_size
            obs[step] = next_obs
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            next_obs, reward, term, trunc, infos = envs.step(action.numpy())
            next_obs = torch.Tensor(next_obs)
            if not writer:
                continue
            for info in infos.get("final_info", []):
                if info and "episode" in info:
                    print(f"global_step={global_step}, return={info['episode']['r']}")
                    writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
        b_inds = np.arange(1024)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, 1024, 256):
                mb = b_inds[start:start + 256]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs.view(-1, 4)[mb])
                loss = -newlogprob.mean() + newvalue.pow(2).mean() - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_grads_list = []
                    for param in agent.parameters():
                        if param.grad is not None:
                            all_grads_list.append(param.grad.view(-1))
                    all_grads = torch.cat(all_grads_list)
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for param in agent.parameters():
                        if param.grad is not None:
                            param.grad.data.copy_(all_grads[offset:offset + param.numel()].view_as(param.grad.data) / world_size)
                            offset += param.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        if local_rank == 0:
            writer.add_scalar("losses/value_loss", loss.item(), global_step)
    envs.close()
    if local_rank == 0:
        writer.close()
    if world_size > 1:
        dist.destroy_process_group()
