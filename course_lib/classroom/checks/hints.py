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
}
