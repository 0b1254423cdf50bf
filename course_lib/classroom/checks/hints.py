"""The hints of each exercise, in the order in which they open: from a question to nearly the answer."""

HINTS: dict[str, tuple[str, ...]] = {
    "ping_pong": (
        "Every rank runs the same function. What tells them apart is comm.rank. Which ranks have nothing "
        "to do?",
        "A send on one rank needs a recv on the other. Write down what rank 0 does in one round, and "
        "beside it rank 1: where rank 0 sends, rank 1 must receive.",
        "Return at once if comm.world_size == 1 or comm.rank > 1. Rank 0: comm.send(tensor, 1), then "
        "comm.recv(tensor, 1).",
        "Rank 1, in each round: comm.recv(tensor, 0); tensor += 1; comm.send(tensor, 0). Both work on the "
        "tensor itself.",
    ),
    "pass_it_on": (
        "Stand in a circle. Everybody hands a slip of paper to the right and takes one from the left, N-1 "
        "times. What do you hand on in the second round?",
        "The right neighbour is (comm.rank + 1) % N, the left one (comm.rank - 1) % N. All ranks send at "
        "the same time, so use comm.exchange: it sends and receives at once.",
        "What arrives in round `step` (1, 2, ...) has gone `step` places: it is the number of rank "
        "(comm.rank - step) % N.",
        "Receive into a new tensor, torch.empty_like(mine), and hand on that tensor in the next round. An "
        "exchange must not receive into the tensor that it sends.",
    ),
    "ring_all_reduce": (
        "Cut the tensor into N chunks. Passing whole tensors, how often does one chunk travel? How often "
        "must it, if a rank adds its own values to what passes by, and hands on the sum?",
        "Two rounds of N-1 steps. First each chunk travels once around the ring and is added up on the "
        "way. Then each finished chunk travels once around and is copied.",
        "First round, step i: send chunk (rank - 1 - i) % N to the right, receive chunk (rank - 2 - i) % "
        "N from the left and add it to yours. After N-1 steps chunk `rank` is complete on this rank.",
        "Second round, step i: send chunk (rank - i) % N to the right, receive chunk (rank - 1 - i) % N "
        "from the left into its place.",
        "Cut with course_lib.plan.partition.chunk_bounds(length, N): some chunks may be empty, and those "
        "are sent too. flat = tensor.reshape(-1) may be a copy (of a transposed tensor, say); then bring "
        "the result back at the end: tensor.copy_(flat.view_as(tensor)).",
    ),
    "ring_reduce_scatter": (
        "It is the first half of the ring all-reduce. Which chunk must be complete on rank r at the end?",
        "Chunk r must *arrive* at rank r in the last step. Go backwards: where is it one step before, and "
        "where does its journey begin?",
        "Step i: send what is summed of chunk (rank - 1 - i) % N to the right; what comes from the left "
        "belongs to chunk (rank - 2 - i) % N. Add your values to it and hand on the sum in the next step.",
        "`tensor` must stay as it is: begin with a copy of the chunk you send first. With one rank there "
        "is no step: then the result is your own chunk. Write it with out.copy_(...).",
    ),
    "tree_all_reduce": (
        "A knock-out tournament: after each round half of the ranks are out, and the winners hold the "
        "sums of two. How many rounds for N ranks?",
        "Distance d = 1, 2, 4, ... below N: a rank whose number is an odd multiple of d sends to rank - d "
        "and is out. The others receive from rank + d, if there is such a rank.",
        "(rank // d) % 2 == 1 is 'an odd multiple of d' for a rank that is still in. When d reaches N, "
        "rank 0 holds the sum.",
        "Back down, the same steps in reverse order, d = ..., 4, 2, 1: where a rank sent, it now "
        "receives, and the other way round. Here the value replaces what was there; nothing is added.",
        "Receive into a buffer, torch.empty_like(tensor), where you add, and into `tensor` itself on the "
        "way down.",
    ),
    "weighted_mean": (
        "Two ranks: one has the samples 0.3 and 0.2, the other 0.8. Each sends the mean of its own. What is "
        "the mean of the "
        "three samples, and how much of it is the first rank's?",
        "A rank's mean times its number of samples is the sum over its samples. Sums may be added.",
        "Add gradient * count over the ranks, then divide by sum(counts). Make a new tensor: the gradients "
        "must stay.",
    ),
    "sharded_step": (
        "Each rank is the server of one chunk. Which part of your gradient does rank 2 need, and what does "
        "it never see?",
        "Push: send chunk s of your gradient to rank s, for every other rank s, and receive everybody's part "
        "of your own "
        "chunk. Everybody sends and receives at once, so use comm.exchange.",
        "Step k = 1 ... N-1: exchange with the rank k places on, (rank + k) % N, and the rank k places back, "
        "(rank - k) % N. "
        "Then nobody gets two messages at once.",
        "Between push and pull, on your own chunk: parameters -= learning_rate * gradient, for your "
        "gradient's part and for "
        "each that came. Then the pull: your chunk goes to everybody, and theirs come into their places.",
        "Cut with course_lib.plan.partition.chunk_bounds(len(parameters), N). parameters[start:stop] is a "
        "view: what you "
        "subtract from it or receive into it is in `parameters`.",
    ),
    "may_pull": (
        "A worker holds parameters of version 3; the newest is 5. How stale is its update, if it comes now? "
        "And if two others "
        "in flight come first?",
        "Nobody knows the order, so think of the worst: everybody else in flight pushes before the one you "
        "look at. The new "
        "worker will be in flight too.",
        "For a worker that pulled version v: version - v updates have come since, and as many as there are "
        "others in "
        "flight may still come, the new one among them. No such sum may be larger than the bound.",
        "The worker with the oldest version is the one to look at: version - min(in_flight.values()) + "
        "len(in_flight) <= "
        "bound. And if nobody is in flight? Then one may always pull.",
    ),
    "bucketing": (
        "A gradient has come, for one parameter. In which bucket is its place, and how do you notice that this "
        "bucket is full?",
        "Each bucket has flat memory and, in bucket.views, a view into it for each parameter. The gradient's "
        "share of the average, parameter.grad / self.num_contributing, goes into that view. What goes there if "
        "parameter.grad is None?",
        "Set parameter.grad to the view: when the sum stands in the bucket, the parameter then has it. "
        "bucket.num_missing counts how many gradients have not come; it is yours to count down.",
        "Where nothing is missing, bucket.sum = self.comm_hook(self.comm, bucket.flat) starts the all-reduce and "
        "returns at once. Do not wait: the end of backward does. (In a step bucket.sum begins as None.)",
        "The ranks must start their all-reduces in one order, that of self.buckets. So go through self.buckets "
        "from the first: stop at one that is not full, start those that are full and have not left.",
    ),
    "sampler": (
        "Think of dealing cards: one order of all samples, which every rank knows, and each takes every "
        "num_replicas-th. Where does rank r begin?",
        "Nobody sends the order: each rank computes it. torch.randperm(length, generator=g) gives the same on all "
        "of them if g = torch.Generator().manual_seed(seed + epoch).",
        "All ranks need equally many. Without drop_last: so many that all samples are dealt; what is missing "
        "comes from the beginning of the order. With it: so many that nothing is missing.",
        "each = length // num_replicas with drop_last, else the same rounded up. Entry i of the padded order is "
        "order[i % length], for i from 0 to each * num_replicas - 1: that works for 3 samples on 7 ranks, too.",
    ),
    "weighted_loss": (
        "Rank 0 has one sample with loss 4, rank 1 three with loss 1. What is the mean of the four? And of the "
        "two ranks' means, which is what DDP would make of them?",
        "The mean over all samples is the sum of the ranks' loss_sum, divided by the number of all samples. How "
        "does a rank learn that number? One all-reduce; a rank without samples takes part.",
        "DDP adds up the ranks' gradients *and divides by comm.world_size*. What must the loss be multiplied "
        "with, so that nothing of this is left?",
        "total = torch.tensor(count); comm.all_reduce(total). Never let comm.all_reduce write into loss_sum: "
        "backward needs it as it is. Return a tensor that comes from loss_sum.",
    ),
    "rank_arithmetic": (
        "Write down all workers of [2, 1], one below the other: node 0 first, then node 1. RANK numbers the lines of "
        "this list from 0. Where in it does node 1 begin?",
        "RANK is the number of workers on the nodes before this one, plus local_rank. Which of the numbers in "
        "nproc_per_node belong to the nodes before?",
        "sum(nproc_per_node[:node]) are the workers before. What begins with LOCAL is about this node alone; "
        "what begins "
        "with GROUP is about nodes, which torchrun calls groups.",
        "WORLD_SIZE is sum(nproc_per_node), on every rank. All workers have the same role, so ROLE_RANK and "
        "ROLE_WORLD_SIZE are RANK and WORLD_SIZE.",
    ),
    "port_launcher": (
        "Run the old script as it is with `torchrun --standalone --nproc-per-node 2`. What does a worker not "
        "get any more, "
        "and where does torchrun put it instead? (Look at the table of variables.)",
        'args.local_rank becomes int(os.environ["LOCAL_RANK"]), and the argument leaves the parser. But it '
        "is the number "
        "on one machine. Where does the script use it as the number in the whole job?",
        'dist.init_process_group("gloo") alone takes RANK and WORLD_SIZE from the environment. After it, '
        "dist.get_rank() "
        "and dist.get_world_size() know them; so does DistributedSampler, if you give neither.",
        "One fault has nothing to do with the launcher: print the samples of two epochs. Before each epoch, "
        "sampler.set_epoch(epoch) chooses another order.",
    ),
    "resumable": (
        "You wake up in a new process, in the middle of somebody's training, and find one file. What must "
        "stand in it, so "
        "that you can go on as if nothing had been? Go through what changes from one epoch to the next.",
        "Four things: which epoch comes *next*, model.state_dict(), optimizer.state_dict() (there is the "
        "momentum) and "
        "torch.get_rng_state() (from there dropout draws). torch.save takes a dict of them.",
        "Before the loop: if path.exists(), state = torch.load(path); load_state_dict into model and optimizer, then "
        "torch.set_rng_state. The loop then runs over range(next_epoch, num_epochs), and saves after each epoch.",
        "You may be killed while you write. So never write to `path`: torch.save(state, other) with other = "
        'f"{path}.partial", then os.replace(other, path). There is always a whole file at `path`, the old '
        "one or the new "
        "one.",
    ),
}
