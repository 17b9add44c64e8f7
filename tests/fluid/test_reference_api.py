"""The public names of the reference's optimizer, fleet and metric modules, and what each is here."""

import importlib
from typing import Any

import pytest

pytestmark = pytest.mark.quick


def _named(home: str, names: str) -> dict[str, str]:
    """Names that are the same in a module here."""
    return {name: f"{home}.{name}" for name in names.split()}


_RULES = (
    "SGD Momentum Adagrad Adam Adamax AdamW DecayedAdagrad Ftrl RMSProp Adadelta Lamb LarsMomentum "
    "DGCMomentum ProximalGD ProximalAdagrad ASGD NAdam RAdam Rprop"
)
_WRAPPERS = (
    "Optimizer ModelAverage ExponentialMovingAverage PipelineOptimizer LookaheadOptimizer LookAhead "
    "RecomputeOptimizer DistributedOptimizer lr"
)
_OF_DATASETS = (
    "init update_settings set_filelist set_batch_size set_thread set_use_var set_pipe_command "
    "load_into_memory preload_into_memory wait_preload_done local_shuffle global_shuffle "
    "release_memory get_memory_data_size get_shuffle_data_size slots_shuffle"
)
# What is missing says why, after a dash.
OPTIMIZERS = {
    **_named("optimizer", _RULES),
    **{f"{name}Optimizer": f"optimizer.{name}Optimizer" for name in _RULES.split()},
    **dict.fromkeys(("Dpsgd", "DpsgdOptimizer"), "- noise for differential privacy"),
    "LBFGS": "- a closure that is called several times a step",
    **_named("optimizer", _WRAPPERS),
}
_HERE = (
    "barrier_worker distributed_optimizer init init_server init_worker is_first_worker is_server is_worker "
    "load_model print_table_stat run_server save_inference_model save_persistables server_endpoints "
    "server_index server_num shrink stop_worker worker_endpoints worker_index worker_num util "
    "DistributedStrategy Fleet PaddleCloudRoleMaker UserDefinedRoleMaker Role InMemoryDataset QueueDataset "
    "MultiSlotDataGenerator MultiSlotStringDataGenerator"
)
_RINGS = (
    "CommunicateTopology HybridCommunicateGroup get_hybrid_communicate_group local_rank local_device_ids "
    "get_hybrid_parallel_topology collective_perf world_device_ids"
)
_FEDERATED = ("init_coordinator", "is_coordinator", "get_fl_client", "make_fl_strategy")
FLEET = {
    **_named("fleet", _HERE),
    "UtilBase": "fleet.Util",
    "all_reduce": "fleet.util.all_reduce",
    "minimize": "optimizer.DistributedOptimizer.minimize",
    **dict.fromkeys(("save", "save_dense_params", "save_one_table"), "fleet.save_persistables"),
    "load_inference_model": "fluid.io.load_inference_model",
    "load_one_table": "fleet.load_model",
    **dict.fromkeys(_RINGS.split(), "- collectives between GPUs"),
    "node_num": "- machines are the launcher's matter",
    **dict.fromkeys(("amp_init", "get_loss_scaling"), "fleet.DistributedStrategy"),
    "qat_init": "- quantized training",
    "set_date": "- the reference's GPU servers alone",
    **dict.fromkeys(
        ("save_cache_model", "save_cache_table"), "- one memory for all rows of a server"
    ),
    **dict.fromkeys(_FEDERATED, "- federated learning"),
}
UTIL = _named("fleet.util", "all_gather all_reduce barrier get_file_shard print_on_rank") | {
    "get_heter_file_shard": "fleet.util.get_file_shard"
}
DATASETS = {
    **_named("fleet.InMemoryDataset", _OF_DATASETS),
    "set_date": "- the reference's GPU servers alone",
    "tdm_sample": "- sampling of a tree index",
    "DatasetFactory": "fluid.DatasetFactory",
}
GENERATORS = _named(
    "fleet.MultiSlotDataGenerator",
    "generate_batch generate_sample run_from_memory run_from_stdin set_batch",
)
FLEET_METRICS = _named("fleet.metrics", "sum max min auc mae rmse mse acc")
METRICS = {
    **_named("fluid.metrics", "Accuracy Auc Precision Recall accuracy"),
    **dict.fromkeys(("Metric", "MetricBase"), "fluid.metrics.Metric"),
    "CompositeMetric": "fleet.metrics",
    **_named("fluid.metrics", "Precision.update Precision.eval Precision.accumulate Recall.reset"),
    "ChunkEvaluator": "- named entities",
    "EditDistance": "- texts",
    "DetectionMAP": "- boxes in images",
}
ALL = {
    "optimizer": OPTIMIZERS,
    "fleet": FLEET,
    "fleet.util": UTIL,
    "fleet.dataset": DATASETS,
    "fleet.data_generator": GENERATORS,
    "fleet.metrics": FLEET_METRICS,
    "metric": METRICS,
}


def test_names_of_the_reference() -> None:
    """Each is something here that can be used, or is known to be missing, with the reason."""
    for name, here in ((n, here) for names in ALL.values() for n, here in names.items()):
        if here.startswith("-"):
            assert len(here) > 5
            continue
        module, *rest = here.split(".")
        actual: Any = importlib.import_module(f"psfleet.{module}")
        for part in rest:
            assert hasattr(actual, part), f"{name}: no {here}"
            actual = getattr(actual, part)
        assert callable(actual) or name in ("lr", "util"), name
