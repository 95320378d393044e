//! The backend against a real cluster, where the binaries of one are found (`WINDLASS_KUBE_BIN`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::{collections::BTreeMap, process::Command, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use windlass_backend::{
    Backend, BackendError, BackendInstance, ContainerRequest, DeleteProgress, Enrolment, InstanceRequest,
    InstanceSource, InstanceState, conformance::check_backend, remote::AgentBinaries,
};
use windlass_kubernetes::{KubernetesBackend, KubernetesSettings};
use windlass_model::id::InstanceId;
use windlass_testkit::{
    TempDir,
    kubernetes::{IMAGE, KubeCluster},
    wait::eventually_ok_async,
};

const NAMESPACE: &str = "jobs";
/// Hash and key of a server that no test calls.
const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

/// A cluster with a namespace and with an account that has exactly the documented rights.
struct Site {
    cluster: KubeCluster,
    settings: Value,
    agent: TempDir,
}

impl Site {
    fn start() -> Option<Self> {
        let cluster = KubeCluster::start()?;
        let created =
            cluster.api("POST", "/api/v1/namespaces", Some(&json!({"metadata": {"name": NAMESPACE}})));
        assert_eq!(created["metadata"]["name"], NAMESPACE, "{created}");
        let site = Self { settings: Value::Null, agent: agent(), cluster };
        for object in manifest() {
            site.apply(&object);
        }
        let token = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/windlass/token");
        let made = site.cluster.api("POST", &token, Some(&json!({"spec": {}})));
        let token = made["status"]["token"].as_str().unwrap_or_else(|| panic!("no token: {made}")).to_owned();
        let admin = std::fs::read_to_string(site.cluster.kubeconfig()).unwrap();
        assert!(admin.contains("token: token-admin"));
        let config = admin.replace("token: token-admin", &format!("token: {token}"));
        let settings = json!({"kubeconfig": {"data": config}, "namespace": NAMESPACE});
        Some(Self { settings, ..site })
    }

    /// Creates an object of the manifest.
    fn apply(&self, object: &Value) {
        let rbac = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}");
        let path = match object["kind"].as_str().unwrap() {
            "ServiceAccount" => format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts"),
            "Role" => format!("{rbac}/roles"),
            "RoleBinding" => format!("{rbac}/rolebindings"),
            "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles".to_owned(),
            "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings".to_owned(),
            other => panic!("unexpected object {other}"),
        };
        let made = self.cluster.api("POST", &path, Some(object));
        assert_ne!(made["kind"], "Status", "{made}");
    }

    fn open(&self) -> Arc<dyn Backend> {
        self.open_with(&json!({}))
    }

    fn open_with(&self, more: &Value) -> Arc<dyn Backend> {
        let mut settings = self.settings.clone();
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let settings = KubernetesSettings::from_json(settings).unwrap();
        Arc::new(
            KubernetesBackend::new(settings, AgentBinaries::of([self.agent.path().join("agent")])).unwrap(),
        )
    }

    async fn order(&self, number: u8, image: &str) -> InstanceRequest {
        let offer = self.open().offers().await.unwrap().remove(0);
        let instance: InstanceId = format!("0190a0b0-0000-7000-8000-0000000000{number:02x}").parse().unwrap();
        InstanceRequest {
            instance,
            name: "jobs-0".into(),
            want: InstanceSource::Offer(Box::new(offer)),
            enrolment: Enrolment {
                instance,
                credential_sha256: HASH.into(),
                server_key: BASE64.encode([7; 32]),
                gateway_key: None,
            },
            tags: BTreeMap::new(),
            env: BTreeMap::new(),
            alternatives: Vec::new(),
            login: None,
            container: Some(ContainerRequest {
                image: image.into(),
                registry_auth: None,
                cpus: None,
                memory_mib: None,
                disk_mib: None,
                shm_mib: None,
                gpus: 0,
                privileged: false,
            }),
        }
    }
}

/// Objects of the documented manifest, for the namespace of the tests.
fn manifest() -> Vec<Value> {
    let text = include_str!("../../../../docs/kubernetes-role.json");
    let list: Value = serde_json::from_str(&text.replace("NAMESPACE", NAMESPACE)).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// The agent, which is built with the tests of the whole workspace, without debug information.
fn agent() -> TempDir {
    let test = std::env::current_exe().unwrap();
    let dir = test.ancestors().find(|dir| dir.join("windlass-agent").exists());
    let whole = dir.unwrap_or_else(|| panic!("`windlass-agent` is not built")).join("windlass-agent");
    let temp = windlass_testkit::temp_dir("agent").unwrap();
    let stripped = Command::new("strip").arg("-o").arg(temp.path().join("agent")).arg(&whole).status();
    assert!(stripped.unwrap().success());
    temp
}

async fn running(
    backend: &dyn Backend,
    order: &InstanceRequest,
    machine: BackendInstance,
) -> BackendInstance {
    eventually_ok_async("the pod runs", async || match backend.find(order, &machine).await {
        Ok(InstanceState::Running(found)) => Ok(found),
        other => Err(format!("{other:?}")),
    })
    .await
}

/// Waits until the pod is over, and returns why.
async fn over(backend: &dyn Backend, order: &InstanceRequest, machine: &BackendInstance) -> String {
    eventually_ok_async("the pod is over", async || match backend.find(order, machine).await {
        Ok(InstanceState::Gone { message }) => Ok(message),
        other => Err(format!("{other:?}")),
    })
    .await
}

async fn delete(backend: &dyn Backend, order: &InstanceRequest, machine: Option<&BackendInstance>) {
    eventually_ok_async("the pod is deleted", async || match backend.delete(order, machine).await {
        Ok(DeleteProgress::Gone) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

/// One cluster for all: its start takes longer than the tests.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_real_cluster_are_instances() {
    let Some(site) = Site::start() else { return };
    let order = site.order(1, IMAGE).await;
    check_backend(&|| site.open(), &order).await;
    assert!(site.cluster.pods(NAMESPACE).is_empty(), "nothing is left");
    an_unknown_image_ends_the_pod_with_the_reason(&site).await;
    a_pod_that_does_not_fit_waits_with_the_words_of_the_scheduler(&site).await;
    the_agent_is_reached_after_the_api_server_was_killed(&site).await;
    a_secret_for_the_registry_lives_as_long_as_its_pod(&site).await;
    nodes_say_why_they_take_no_pods(&site).await;
    a_pod_without_a_job_is_refused(&site).await;
}

async fn an_unknown_image_ends_the_pod_with_the_reason(site: &Site) {
    let (backend, order) = (site.open(), site.order(2, "registry.invalid/none:1").await);
    let machine = backend.create(&order).await.unwrap();
    let message = over(&*backend, &order, &machine).await;
    assert!(message.starts_with("failed to pull the image: "), "{message}");
    delete(&*backend, &order, Some(&machine)).await;
}

async fn a_pod_that_does_not_fit_waits_with_the_words_of_the_scheduler(site: &Site) {
    let (backend, mut order) = (site.open(), site.order(3, IMAGE).await);
    if let Some(container) = &mut order.container {
        container.cpus = Some(999);
    }
    let machine = backend.create(&order).await.unwrap();
    let message =
        eventually_ok_async("the scheduler reports", async || match backend.find(&order, &machine).await {
            Ok(InstanceState::Starting(found)) => match found.message() {
                Some(message) => Ok(message.to_owned()),
                None => Err("no message".to_owned()),
            },
            other => Err(format!("{other:?}")),
        })
        .await;
    assert_eq!(message, "no node of 1 takes the pod now: 1 × too few free CPUs");
    delete(&*backend, &order, Some(&machine)).await;
}

async fn the_agent_is_reached_after_the_api_server_was_killed(site: &Site) {
    let (backend, order) = (site.open(), site.order(4, IMAGE).await);
    let machine = backend.create(&order).await.unwrap();
    let machine = running(&*backend, &order, machine).await;
    assert!(machine.internal_ip.is_some(), "{machine:?}");
    drop(backend.connect(&machine).await.unwrap());
    site.cluster.restart("apiserver");
    let stream = eventually_ok_async("a stream is opened", async || {
        backend.connect(&machine).await.map_err(|error| error.to_string())
    });
    drop(stream.await);
    // Somebody deletes the pod.
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", machine.id);
    let _ = site.cluster.api("DELETE", &path, None);
    let message = over(&*backend, &order, &machine).await;
    assert!(message.starts_with("the pod "), "{message}");
    delete(&*backend, &order, Some(&machine)).await;
}

async fn a_secret_for_the_registry_lives_as_long_as_its_pod(site: &Site) {
    let (backend, mut order) = (site.open(), site.order(5, IMAGE).await);
    if let Some(container) = &mut order.container {
        container.registry_auth = Some(("ada".into(), "hunter2".into()));
    }
    let secrets = format!("/api/v1/namespaces/{NAMESPACE}/secrets");
    let names = || {
        let list = site.cluster.api("GET", &secrets, None);
        list["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["metadata"]["name"].clone())
            .collect::<Vec<_>>()
    };
    let machine = backend.create(&order).await.unwrap();
    assert_eq!(names(), [json!(machine.id)]);
    let machine = running(&*backend, &order, machine).await;
    delete(&*backend, &order, Some(&machine)).await;
    assert!(names().is_empty());
    assert!(site.cluster.pods(NAMESPACE).is_empty());
}

async fn nodes_say_why_they_take_no_pods(site: &Site) {
    let node = site.open().offers().await.unwrap().remove(0).instance_type;
    let path = format!("/api/v1/nodes/{node}");
    let patched = site.cluster.api("PATCH", &path, Some(&json!({"spec": {"unschedulable": true}})));
    assert_eq!(patched["spec"]["unschedulable"], true, "{patched}");
    let offer = site.open().offers().await.unwrap().remove(0);
    assert!(format!("{:?}", offer.host.runtimes).contains("it is cordoned"), "{offer:?}");
    let _ = site.cluster.api("PATCH", &path, Some(&json!({"spec": {"unschedulable": null}})));
    let gpus =
        json!({"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}});
    let _ = site.cluster.api("PATCH", &format!("{path}/status"), Some(&gpus));
    let offer = site.open().offers().await.unwrap().remove(0);
    assert_eq!(offer.host.gpus.len(), 8, "{offer:?}");
}

async fn a_pod_without_a_job_is_refused(site: &Site) {
    let order = InstanceRequest { container: None, ..site.order(6, IMAGE).await };
    let error = site.open().create(&order).await.unwrap_err();
    assert!(
        matches!(&error, BackendError::Refused { message, .. } if message.contains("`nodes`")),
        "{error}"
    );
}
