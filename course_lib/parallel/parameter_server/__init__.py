"""Parameter servers: workers compute gradients, a server updates the parameters, and the workers fetch them.

    synchronous.py   all N ranks work; one of them also adds up and updates. Equal to one process on the whole
    batch sharded.py       the same, but every rank serves 1/N of the parameters: nobody chokes
    asynchronous.py  nobody waits for anybody: gradients are taken at weights that have moved on since
    serving.py       … its server: a thread for each worker staleness.py     … how stale an update is, and the
    rule that bounds it flat.py          a module's parameters and gradients as one vector, which is what
    travels load.py          how long a step's messages take

M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), for push, pull and
servers that each hold a range of the keys; J. Dean et al., "Large Scale Distributed Deep Networks" (NIPS
2012), section 4.1, for asynchronous updates (Downpour SGD). `plan.server_traffic` counts the bytes.
"""

from course_lib.parallel.parameter_server.asynchronous import AsyncParameterServer as AsyncParameterServer
from course_lib.parallel.parameter_server.flat import PeerLost as PeerLost
from course_lib.parallel.parameter_server.load import measure_steps as measure_steps
from course_lib.parallel.parameter_server.sharded import ShardedParameterServer as ShardedParameterServer
from course_lib.parallel.parameter_server.sharded import sharded_step as sharded_step
from course_lib.parallel.parameter_server.staleness import AsyncReport as AsyncReport
from course_lib.parallel.parameter_server.staleness import Update as Update
from course_lib.parallel.parameter_server.staleness import may_pull as may_pull
from course_lib.parallel.parameter_server.synchronous import ParameterServer as ParameterServer
from course_lib.parallel.parameter_server.synchronous import weighted_mean as weighted_mean
