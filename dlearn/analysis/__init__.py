"""From a trace to answers: every function takes a Trace and returns a frozen value. Nothing here draws or prints.

`assert_...` returns nothing, or raises a TrafficError that shows what is wrong: for exercises and for tests.
"""

from dlearn.analysis.checks.freshness import assert_fresh, assert_reduces
from dlearn.analysis.checks.grading import assert_traffic
from dlearn.analysis.costs.bandwidth import Bandwidth, Bandwidths, bandwidth, bandwidths
from dlearn.analysis.costs.pipeline_bubble import Pipeline, pipeline
from dlearn.analysis.costs.plan_times import Machine, PlanTimes, plan_times
from dlearn.analysis.costs.scaling import Scaling, scaling
from dlearn.analysis.ddp.breakdown import Breakdown, breakdown
from dlearn.analysis.ddp.bucket_times import BucketTimes, bucket_times
from dlearn.analysis.ddp.overlap import Overlap, overlap
from dlearn.analysis.ddp.step_times import RunSteps, step_times
from dlearn.analysis.rpc.iteration import Iteration, iteration, iterations
from dlearn.analysis.telling.explanations import Explanation, explain
from dlearn.analysis.volume.comparing import Comparison, compare
from dlearn.analysis.volume.parallel_plan import ParallelPlan, PlanComparison, plan
from dlearn.analysis.volume.plan_rows import ModelShape
from dlearn.analysis.volume.rank_memory import RankMemory, rank_memory
from dlearn.analysis.volume.reconcile import Reconciliation, reconcile
from dlearn.analysis.volume.topology import Topology, topologies, topology
from dlearn.analysis.volume.traffic import Traffic, WireTraffic, measured_traffic, predicted_traffic, traffic
from dlearn.diagnosis.hang_detection import Hang, Mismatch, hangs, mismatches
from dlearn.diagnosis.roots import Root, Victim, roots, victims
from dlearn.diagnosis.training_report import GradientSteps, gradients
from dlearn.join.autograd_graph import autograd_graph
from dlearn.join.joining import operations
from dlearn.join.message_evidence import messages

__all__ = ["Bandwidth", "Bandwidths", "Breakdown", "BucketTimes", "Comparison", "Explanation"]
__all__ += ["GradientSteps", "Hang", "Iteration", "Machine", "Mismatch", "ModelShape", "Overlap"]
__all__ += ["ParallelPlan", "Pipeline", "PlanComparison", "PlanTimes"]
__all__ += ["RankMemory", "Reconciliation", "Root", "RunSteps", "Scaling", "Topology"]
__all__ += ["Traffic", "Victim", "WireTraffic", "assert_fresh", "assert_reduces"]
__all__ += ["assert_traffic", "autograd_graph", "bandwidth", "bandwidths", "breakdown"]
__all__ += ["bucket_times", "compare", "explain", "gradients", "hangs", "iteration"]
__all__ += ["iterations", "measured_traffic", "messages", "mismatches", "operations", "overlap"]
__all__ += ["pipeline", "plan", "plan_times", "predicted_traffic", "rank_memory", "reconcile"]
__all__ += ["roots", "scaling", "step_times", "topologies", "topology", "traffic", "victims"]
__dir__ = __all__.copy  # What Tab offers.
