"""The files in examples/kubernetes: fields and types of the manifests, what the launchers make of them, numbers that fit."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import dagster as dg
import dagster_docker
import dagster_k8s
import docker.client
import kubernetes.client
import pytest
import yaml
from dagster._config import process_config
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.instance.config import dagster_instance_config
from dagster._core.launcher import LaunchRunContext
from dagster_docker import DockerRunLauncher
from dagster_k8s import K8sRunLauncher
from dagster_k8s.job import get_user_defined_k8s_config
from dagster_postgres.utils import get_conn_string
from docker.models.containers import RUN_CREATE_KWARGS, RUN_HOST_CONFIG_KWARGS
from sqlalchemy.engine import make_url

from dagster_checkpoints import CheckpointCoordinatorResource, build_recovery_sensor
from dagster_checkpoints.cli.app import app
from dagster_checkpoints.plugin.job_run import CANCEL_SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples/kubernetes"
MANIFESTS = {"health-cronjob.yaml": "V1CronJob", "service-account.yaml": "V1ServiceAccount"}
NATIVE = {"str": str, "int": int, "float": float, "bool": bool}


def mistakes(value: Any, kind: str, at: str = "") -> list[str]:
    """What the Kubernetes client's model of a type does not allow in a value as JSON: fields, types, missing fields."""
    if container := re.fullmatch(r"(list|dict)[\[(](?:str, )?(.+)[\])]", kind):
        expected, item = (list if container[1] == "list" else dict), container[2]
        if not isinstance(value, expected):
            return [f"{at}: expected {kind}, found {value!r}"]
        items = enumerate(value) if expected is list else value.items()
        return [each for key, inner in items for each in mistakes(inner, item, f"{at}[{key}]")]
    if kind in NATIVE:
        fits = isinstance(value, NATIVE[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if fits else [f"{at}: expected {kind}, found {value!r}"]
    if kind == "object":
        return []
    if not isinstance(value, dict):
        return [f"{at}: expected {kind}, found {value!r}"]
    model = getattr(kubernetes.client, kind)
    names = {written: name for name, written in model.attribute_map.items()}
    found = [f"{at}.{key}: {kind} has no such field" for key in value if key not in names]
    known = {names[key]: inner for key, inner in value.items() if key in names}
    for name, inner in known.items():
        found += mistakes(inner, model.openapi_types[name], f"{at}.{model.attribute_map[name]}")
    try:
        model(**known)
    except ValueError as error:
        found.append(f"{at}: {error}")
    return found


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLE / name).read_text(encoding="utf-8"))


def launcher_config(name: str) -> Any:
    return load(name)["run_launcher"]["config"]


GRACE_PERIODS = {
    "dagster.yaml": launcher_config("dagster.yaml")["run_k8s_config"]["pod_spec_config"]["terminationGracePeriodSeconds"],
    "dagster-docker.yaml": launcher_config("dagster-docker.yaml")["container_kwargs"]["stop_timeout"],
}


@pytest.fixture(scope="module")
def orders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kubernetes_orders", EXAMPLE / "orders.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Dagster's storage


@pytest.mark.parametrize("name", GRACE_PERIODS)
def test_dagsters_storage_is_reached_with_the_driver_that_its_package_brings(name: str) -> None:
    """The default of SQLAlchemy 2.1 is another one, which the image does not have (docs/dagster.md)."""
    settings = load(name)["storage"]["postgres"]["postgres_db"]
    given = {field: value["env"].lower() if isinstance(value, dict) else value for field, value in settings.items()}
    assert make_url(get_conn_string(**given)).get_driver_name() == "psycopg2"


# Manifests


@pytest.mark.parametrize("file", MANIFESTS)
def test_every_field_of_a_manifest_exists_and_none_is_missing(file: str) -> None:
    manifest = load(file)
    assert f"V1{manifest['kind']}" == MANIFESTS[file]
    assert manifest["apiVersion"] == ("batch/v1" if manifest["kind"] == "CronJob" else "v1")
    assert mistakes(manifest, MANIFESTS[file]) == []


def test_every_manifest_of_the_example_is_checked() -> None:
    found = {file.name for file in EXAMPLE.iterdir() if file.suffix == ".yaml" and "apiVersion" in load(file.name)}
    assert found == set(MANIFESTS)


def pod(manifest: Any) -> Any:
    return manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (lambda manifest: pod(manifest).update(restartPolice="Never"), ".restartPolice: V1PodSpec has no such field"),
        (lambda manifest: pod(manifest).update(service_account_name="runs"), ".service_account_name: V1PodSpec has no"),
        (lambda manifest: pod(manifest).pop("containers"), "`containers`, must not be `None`"),
        (lambda manifest: pod(manifest)["containers"][0].pop("name"), "`name`, must not be `None`"),
        (lambda manifest: pod(manifest)["containers"][0].update(command=["health", 10]), ".command[1]: expected str, found 10"),
        (lambda manifest: manifest["spec"].update(schedule=5), ".spec.schedule: expected str, found 5"),
        (lambda manifest: manifest["spec"].update(suspend="no"), ".spec.suspend: expected bool, found 'no'"),
        (lambda manifest: manifest["spec"]["jobTemplate"]["spec"].update(backoffLimit=True), ".backoffLimit: expected int"),
        (lambda manifest: pod(manifest).update(containers={}), ".containers: expected list[V1Container], found {}"),
    ],
)
def test_the_check_of_manifests_finds(change: Callable[[Any], Any], mistake: str) -> None:
    manifest = copy.deepcopy(load("health-cronjob.yaml"))
    change(manifest)
    (found,) = mistakes(manifest, "V1CronJob")
    assert mistake in found


def test_the_command_of_the_health_check_can_be_typed(orders: ModuleType) -> None:
    (container,) = pod(load("health-cronjob.yaml"))["containers"]
    program, name, *arguments = container["command"]
    assert (program, name) == ("dagster-checkpoints", "health")
    command = app.get_command(app.make_context(program, [], resilient_parsing=True), name)
    assert command is not None
    given = command.make_context(name, list(arguments)).params
    assert orders.pipeline.name in arguments
    assert given["during"] < load("health-cronjob.yaml")["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"]


# Dagster's instance


@pytest.mark.parametrize(("file", "launcher"), [("dagster.yaml", K8sRunLauncher), ("dagster-docker.yaml", DockerRunLauncher)])
def test_the_configuration_of_the_instance_is_valid(file: str, launcher: type[Any], tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text((EXAMPLE / file).read_text(encoding="utf-8"))
    settings, _ = dagster_instance_config(str(tmp_path))
    assert (settings["run_launcher"]["module"], settings["run_launcher"]["class"]) == (
        launcher.__module__.split(".")[0],
        launcher.__name__,
    )
    checked = process_config(launcher.config_type(), settings["run_launcher"]["config"])
    assert checked.success, checked.errors
    monitoring = settings["run_monitoring"]
    assert monitoring["enabled"] and monitoring["max_resume_run_attempts"] == 0
    mistaken = {**settings["run_launcher"]["config"], "container_config": {}}
    assert not process_config(launcher.config_type(), mistaken).success


def run_of(instance: dg.DagsterInstance, orders: ModuleType) -> dg.DagsterRun:
    """A run of the job, as the daemon hands it to the launcher."""
    repository = ReconstructableRepository.for_file(
        str(EXAMPLE / "orders.py"), "defs", str(EXAMPLE), container_image="your-registry/orders:1"
    )
    origin = repository.get_reconstructable_job("orders_job").get_python_origin()
    job = orders.defs.resolve_job_def("orders_job")
    return instance.create_run_for_job(job, tags=dict(job.tags), job_code_origin=origin)


def context_of(run: dg.DagsterRun) -> LaunchRunContext:
    return LaunchRunContext(dagster_run=run, workspace=None)


@pytest.fixture
def launched(orders: ModuleType, tmp_path: Path) -> Any:
    """The Kubernetes job, as JSON, that the launcher creates for a run of the example's job."""
    cluster = {
        "clusters": [{"name": "c", "cluster": {"server": "https://nowhere.invalid"}}],
        "users": [{"name": "u", "user": {}}],
    }
    context = {"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x"}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(cluster | context))
    created: list[Any] = []
    batch = SimpleNamespace(create_namespaced_job=lambda namespace, body, **_: created.append((namespace, body)))
    settings = launcher_config("dagster.yaml")
    value = process_config(K8sRunLauncher.config_type(), settings).value
    assert value is not None
    outside = {"load_incluster_config": False, "kubeconfig_file": str(tmp_path / "kubeconfig"), "k8s_client_batch_api": batch}
    launcher = K8sRunLauncher(**{**value, **outside})
    with dg.instance_for_test() as instance:
        launcher.register_instance(instance)
        launcher.launch_run(context_of(run_of(instance, orders)))
    ((namespace, job),) = created
    assert namespace == "dagster"
    return kubernetes.client.ApiClient().sanitize_for_serialization(job)


def test_the_pod_of_a_run_has_what_the_example_configures(orders: ModuleType, launched: Any) -> None:
    assert mistakes(launched, "V1Job") == []
    spec = launched["spec"]
    assert spec["podReplacementPolicy"] == "Failed" and spec["backoffLimit"] == 0
    template = spec["template"]["spec"]
    assert template["restartPolicy"] == "Never"
    assert template["serviceAccountName"] == load("service-account.yaml")["metadata"]["name"]
    assert template["terminationGracePeriodSeconds"] > orders.coordinator.termination_timeout + CANCEL_SECONDS
    assert {"name": "work", "emptyDir": {"sizeLimit": "20Gi"}} in template["volumes"]
    (container,) = template["containers"]
    assert {"name": "work", "mountPath": "/tmp"} in container["volumeMounts"]
    assert container["resources"] == orders.POD["container_config"]["resources"]
    assert container["args"][:3] == ["dagster", "api", "execute_run"] and "command" not in container


def test_the_tag_of_the_job_is_checked_by_dagster(orders: ModuleType) -> None:
    tags = dict(orders.defs.resolve_job_def("orders_job").tags)
    config = get_user_defined_k8s_config(tags)
    assert config.pod_spec_config["volumes"] == [{"name": "work", "empty_dir": {"size_limit": "20Gi"}}]
    for mistaken in ({"containers_config": {}}, {"pod_spec_config": {"volume": []}}, {"container_config": {"resource": {}}}):
        with pytest.raises(Exception, match=r"dagster-k8s/config|Unexpected keys"):
            get_user_defined_k8s_config({"dagster-k8s/config": json.dumps(mistaken)})


def test_a_recovered_run_has_the_pod_of_the_failed_one(orders: ModuleType) -> None:
    from dagster_checkpoints.plugin.runs import repeated_tags

    tags = dict(orders.defs.resolve_job_def("orders_job").tags)
    assert repeated_tags(tags | {"dagster/run_key": "1"}) == tags


def test_the_numbers_fit(orders: ModuleType) -> None:
    assert orders.coordinator.savepoint_on_termination
    for file, seconds in GRACE_PERIODS.items():
        assert seconds > orders.coordinator.termination_timeout + CANCEL_SECONDS
        assert load(file)["run_monitoring"]["cancel_timeout_seconds"] > seconds

    spark = orders.coordinator.spark_settings()
    resources = orders.POD["container_config"]["resources"]
    for limits in (resources["requests"], resources["limits"]):
        assert spark["spark.master"] == f"local[{limits['cpu']}]"
        heap, memory = int(spark["spark.driver.memory"].removesuffix("g")), int(limits["memory"].removesuffix("Gi"))
        assert 0 < heap <= memory / 2, "the rest is for Python workers, RocksDB and Dagster"
    container = launcher_config("dagster-docker.yaml")["container_kwargs"]
    assert container["nano_cpus"] == int(resources["limits"]["cpu"]) * 10**9
    assert container["mem_limit"].removesuffix("g") == resources["limits"]["memory"].removesuffix("Gi")


PAGE = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")


def test_the_settings_and_executors_that_the_page_names_exist() -> None:
    settings = {*K8sRunLauncher.config_type(), *DockerRunLauncher.config_type(), *RUN_HOST_CONFIG_KWARGS}
    assert {"container_kwargs", "image", "job_image", "mem_limit", "nano_cpus", "run_k8s_config"} <= settings
    assert "start_timeout_seconds" in load("dagster.yaml")["run_monitoring"]
    executors = {name for module in (dg, dagster_k8s, dagster_docker) for name in vars(module)}
    named = set(re.findall(r"`(\w+_executor)`", PAGE))
    assert len(named) == 4 and named <= executors


def test_the_times_on_the_page_are_those_of_the_code(orders: ModuleType) -> None:
    default = CheckpointCoordinatorResource.model_fields["termination_timeout"].default
    assert f"termination_timeout ({default:g} s)  +  {CANCEL_SECONDS:g} s" in PAGE
    grace_period, timeout = GRACE_PERIODS["dagster.yaml"], orders.coordinator.termination_timeout
    assert f"{grace_period} s in the example, with a `termination_timeout` of {timeout:g} s" in PAGE
    assert f"docker stop -t {grace_period}" in PAGE
    parameters = inspect.signature(build_recovery_sensor).parameters
    assert f"not renewed for {parameters['dead_after'].default:g} s" in " ".join(PAGE.split())
    assert parameters["reset_after"].default == 3600, "an hour"


# Docker


def test_a_run_in_a_container_and_its_termination(orders: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "DAGSTER_PG_HOST", "DAGSTER_PG_USERNAME", "DAGSTER_PG_PASSWORD", "DAGSTER_PG_DB"):
        monkeypatch.setenv(name, name.lower())
    created: list[dict[str, Any]] = []
    stopped: list[int | None] = []
    container = SimpleNamespace(id="c", start=lambda: None, stop=lambda timeout: stopped.append(timeout))
    containers = SimpleNamespace(create=lambda **given: (created.append(given), container)[1], get=lambda _: container)
    monkeypatch.setattr(docker.client, "from_env", lambda: SimpleNamespace(containers=containers))
    config = process_config(DockerRunLauncher.config_type(), launcher_config("dagster-docker.yaml")).value
    assert config is not None
    launcher = DockerRunLauncher(**config)
    with dg.instance_for_test() as instance:
        launcher.register_instance(instance)
        run = run_of(instance, orders)
        launcher.launch_run(context_of(run))
        (given,) = created
        own = {"network"}  # docker-py takes it apart from the lists
        assert set(given) <= {*RUN_CREATE_KWARGS, *RUN_HOST_CONFIG_KWARGS, *own, "volumes"}
        assert given["environment"]["DAGSTER_PG_HOST"] == "dagster_pg_host"
        assert given["command"][:3] == ["dagster", "api", "execute_run"]
        assert "stop_timeout" not in given, "`docker stop` by hand has its own time: ten seconds"
        assert launcher.terminate(run.run_id)
    assert stopped == [config["container_kwargs"]["stop_timeout"]]


# The image


def test_the_image_has_java_a_user_with_a_name_and_no_program_in_front() -> None:
    lines = [
        line for line in re.sub(r"\\\n", " ", (EXAMPLE / "Dockerfile").read_text(encoding="utf-8")).splitlines() if line.strip()
    ]
    steps = [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if not line.startswith("#")]
    names = [name for name, _ in steps]
    assert names[0] == "FROM" and "ENTRYPOINT" not in names
    runs = [rest for name, rest in steps if name == "RUN"]
    assert any(re.search(r"openjdk-(17|21)-jre-headless", run) for run in runs)
    (user,) = (rest for name, rest in steps if name == "USER")
    assert any(f"useradd --uid {user} " in run for run in runs)
    (command,) = (json.loads(rest) for name, rest in steps if name == "CMD")
    assert command[-1] in [rest.split()[0] for name, rest in steps if name == "COPY"]
    (storage,) = (rest for name, rest in steps if name == "ENV")
    assert storage.startswith("CHECKPOINT_STORAGE=s3://")


# The pipeline


def test_the_pipeline_of_the_example(orders: ModuleType) -> None:
    dg.Definitions.validate_loadable(orders.defs)
    job = orders.defs.resolve_job_def("orders_job")
    assert job.executor_def is dg.in_process_executor
    assert [node.name for node in job.nodes] == ["orders_assets"], "a run is one op"
