from .pool import TrainerPool as TrainerPool
from .rank import TrainerRank as TrainerRank
from .types import SupervisedExample as SupervisedExample
from .types import TrainerSpec as TrainerSpec
from .types import TrainReport as TrainReport
from .types import WarmStartReport as WarmStartReport
