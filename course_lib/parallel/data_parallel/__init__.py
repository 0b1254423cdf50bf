"""DataParallel from scratch: one process, one model, several devices, a thread for each.

    model = DataParallel(module, ["cuda:0", "cuda:1"])     # or ["cpu", "cpu"]
    loss_fn(model(inputs), targets).backward()             # gradients land in `module`, as without the wrapper

Each forward cuts the batch (`scatter`), copies the module to every device (`replicate`), runs a thread for each copy
(`parallel_apply`) and joins the outputs (`gather`). Backward runs the same ways in reverse: every step's adjoint stands
beside it in `wires`. Device 0 of the list is where the parameters live, so everything passes through its links: with N
devices and Φ bytes of parameters it sends (N-1)·Φ before each forward and receives (N-1)·Φ of gradients after each
backward, beside most of the inputs and outputs.

Same call as `torch.nn.DataParallel`; `module.DataParallel` says what differs. The design is that of torch7's
DataParallelTable (S. Chintala and others, 2015), which PyTorch's DataParallel followed. PyTorch itself now advises one
process for each device instead (S. Li and others, "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020).

Left out: TorchScript modules, overlap of copies with computation, and several batches in flight.
"""

from course_lib.parallel.data_parallel.flows import Flows, Move
from course_lib.parallel.data_parallel.module import DataParallel
from course_lib.parallel.data_parallel.replicate import replicate
from course_lib.parallel.data_parallel.steps import ReplicaError, gather, parallel_apply, scatter
from course_lib.parallel.data_parallel.wires import Place, Wires

__all__ = [
    "DataParallel",
    "Flows",
    "Move",
    "Place",
    "ReplicaError",
    "Wires",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]
