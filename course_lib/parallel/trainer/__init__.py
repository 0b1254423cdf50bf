"""Training that survives: a Trainer with snapshots, and the means to see that it does.

    trainer = Trainer(DDP(model), optimizer, dataset, sampler, comm, batch_size=32, snapshot_path="snapshot.pt")
    trainer.fit(total_epochs=10)       # begins, or goes on from the snapshot

`snapshot`: a file that is whole or not there. `resumable`: what a training is made of. `trainer`: the loop.
`preemption`: SIGTERM. `process_group`: what a script under torchrun calls in place of `init_process_group`. `journal`:
what a run writes down; `audit` and `recovery` read it. `tutorial`: a Trainer that makes the usual mistakes.

`python -m course_lib.train_ddp` runs it on the handwritten digits.
"""

from course_lib.parallel.trainer.audit import Step, kept_samples, read_audit
from course_lib.parallel.trainer.journal import Journal, process_started, restart_count, run_id
from course_lib.parallel.trainer.preemption import EXIT_CODE
from course_lib.parallel.trainer.process_group import process_group
from course_lib.parallel.trainer.recovery import read_events, recovery
from course_lib.parallel.trainer.resumable import Progress
from course_lib.parallel.trainer.snapshot import SnapshotError
from course_lib.parallel.trainer.trainer import Trainer
from course_lib.parallel.trainer.tutorial import MISTAKES, TutorialTrainer

__all__ = [
    "EXIT_CODE",
    "MISTAKES",
    "Journal",
    "Progress",
    "SnapshotError",
    "Step",
    "Trainer",
    "TutorialTrainer",
    "kept_samples",
    "process_group",
    "process_started",
    "read_audit",
    "read_events",
    "recovery",
    "restart_count",
    "run_id",
]
