"""The files of docker/ against the schemas of the tools that read them, and against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cb_backend.cli.paths import checkout_path
from cb_backend.support.version_folder import load_engine_config
from tests.deploy.files import BASE, DOCKER, TWO_GPUS, deployment, documents, run_tool, server_flags

OPERATOR_KINDS = ("PodMonitor", "Kustomization")  # no schema of Kubernetes itself
POD_LABELS = {"llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"}


@pytest.mark.parametrize("path", sorted(BASE.glob("*.yaml")), ids=lambda path: path.name)
def test_kubernetes_accepts_manifest(path: Path) -> None:
    kinds = [document["kind"] for document in documents(path)]
    assert kinds
    for document in documents(path):
        if document["kind"] not in OPERATOR_KINDS:
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_kubernetes_schema_refuses_an_unknown_field() -> None:
    """The check above can fail."""
    broken = deployment()
    broken["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessprobe"):
        kubernetes_validate.validate(broken, "1.30", strict=True)


def test_compose_file_follows_the_specification() -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml"))


def test_compose_mounts_and_build_files_exist() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{name} mounts {source}"
            else:
                assert source in compose["volumes"], f"{name} mounts the volume {source}"
    build = compose["services"]["triton"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()


def test_dockerfile_copies_only_what_the_ignore_file_lets_through() -> None:
    let_through = {line[1:] for line in (DOCKER.parent / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [
        source
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert set(copied) == let_through
    assert all((DOCKER.parent / source).exists() for source in copied)


def test_manifests_name_each_other() -> None:
    manifests = {document["kind"]: document for path in BASE.glob("*.yaml") for document in documents(path)}
    pod = manifests["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    labels, ports = pod["metadata"]["labels"], {port["name"]: port["containerPort"] for port in container["ports"]}
    for selector in (
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert {port["targetPort"] for port in manifests["Service"]["spec"]["ports"]} <= ports.keys()
    assert {endpoint["port"] for endpoint in manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]} <= ports.keys()
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifests["Deployment"]["metadata"]["name"])
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert (
        volumes["cache"]["persistentVolumeClaim"]["claimName"] == manifests["PersistentVolumeClaim"]["metadata"]["name"]
    )
    generated = manifests["Kustomization"]["configMapGenerator"][0]
    assert volumes["engine"]["configMap"]["name"] == generated["name"]
    assert {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"} == set(
        manifests["Kustomization"]["resources"]
    )
    # What the gateway's picker looks at: TensorRT-LLM's names are the ones that we publish without being asked.
    assert {labels[name] for name in POD_LABELS} == {"triton-tensorrt-llm"}


def test_engine_arguments_in_the_config_map_are_valid() -> None:
    config = load_engine_config(BASE / "model.json")
    shipped = json.loads(checkout_path("model_repository/llm/1/model.json").read_text())
    assert config.model == shipped["model"]


def test_a_pod_has_the_gpus_that_its_engines_take() -> None:
    """And the patch is of what is there: another name would make a second container."""
    (patch,) = documents(TWO_GPUS / "gpus.yaml")
    (kustomization,) = documents(TWO_GPUS / "kustomization.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    (patched,) = deployment()["spec"]["template"]["spec"]["containers"]
    assert (patch["metadata"]["name"], container["name"]) == (deployment()["metadata"]["name"], patched["name"])
    assert all((TWO_GPUS / name).exists() for name in kustomization["resources"])
    assert [each["path"] for each in kustomization["patches"]] == ["gpus.yaml"]
    (generated,) = documents(BASE / "kustomization.yaml")[0]["configMapGenerator"]
    (replaced,) = kustomization["configMapGenerator"]
    assert (replaced["name"], replaced["files"]) == (generated["name"], generated["files"])
    for folder, limits in ((BASE, patched["resources"]["limits"]), (TWO_GPUS, container["resources"]["limits"])):
        config = load_engine_config(folder / "model.json")
        assert limits["nvidia.com/gpu"] == config.tensor_parallel_size * config.data_parallel_size
    whole = deployment()
    whole["spec"]["strategy"] = patch["spec"]["strategy"]
    whole["spec"]["template"]["spec"]["containers"][0]["resources"] = container["resources"]
    kubernetes_validate.validate(whole, "1.30", strict=True)


def test_pod_waits_longer_than_the_server_drains() -> None:
    spec = deployment()["spec"]["template"]["spec"]
    container = spec["containers"][0]
    pre_stop = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(server_flags()["exit-timeout-secs"])
    assert spec["terminationGracePeriodSeconds"] > pre_stop + drain
    compose: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert float(compose["services"]["triton"]["stop_grace_period"].removesuffix("s")) > drain


def test_dashboard_has_ids_and_places_of_its_own_for_every_panel() -> None:
    panels = json.loads((DOCKER / "grafana" / "cb_backend.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
            taken[cell] = panel["title"]
